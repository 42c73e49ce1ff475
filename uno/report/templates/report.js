"use strict";
// The page is complete without this file: it adds reading by pointer and keyboard, and nothing else.
(() => {
  document.documentElement.classList.add("scripted");
  const data = JSON.parse(document.getElementById("data").textContent);

  // -------------------------------------------------------------------------------------------------- map
  const map = data.map;
  const box = document.querySelector(".mapbox");
  if (map && box) {
    const hover = box.querySelector(".hover");
    const thumb = hover.querySelector(".thumb"), words = hover.querySelector(".words");
    const lines = Math.ceil(map.ids.length / map.columns);
    const novelOnly = document.getElementById("novel-only");
    document.body.append(hover);
    if (map.sheet) thumb.style.backgroundImage = `url(${map.sheet})`;
    else thumb.hidden = true; // rows without pictures
    thumb.style.backgroundSize = `${56 * map.columns}px ${56 * lines}px`;
    if (map.side <= 16) thumb.style.imageRendering = "pixelated";

    const describe = (i) => {
      const truth = map.truth[i] >= 0 ? `true ${map.true_names[map.truth[i]]}\n` : "";
      return `${map.ids[i]}\n${truth}predicted ${map.names[map.output[i]]}, ${(100 * map.confidence[i]).toFixed(1)}%`;
    };
    const nearest = (x, y) => {
      let best = -1, distance = 30 * 30;
      for (let i = 0; i < map.ids.length; i++) {
        if (novelOnly.checked && map.known[i]) continue;
        const d = (map.xy[2 * i] - x) ** 2 + (map.xy[2 * i + 1] - y) ** 2;
        if (d < distance) { distance = d; best = i; }
      }
      return best;
    };
    const drawing = box.querySelector("svg.map"), pin = drawing.querySelector(".pin");
    const hide = () => {
      hover.hidden = true;
      pin.setAttribute("visibility", "hidden");
    };
    drawing.addEventListener("pointermove", (event) => {
      const area = drawing.getBoundingClientRect(), scale = map.extent / area.width;
      const i = nearest((event.clientX - area.left) * scale, (event.clientY - area.top) * scale);
      if (i < 0) return hide();
      pin.setAttribute("cx", map.xy[2 * i]);
      pin.setAttribute("cy", map.xy[2 * i + 1]);
      pin.setAttribute("visibility", "visible");
      thumb.style.backgroundPosition = `${-56 * (i % map.columns)}px ${-56 * Math.floor(i / map.columns)}px`;
      words.textContent = describe(i);
      hover.hidden = false;
      const x = Math.min(event.pageX + 14, scrollX + document.documentElement.clientWidth - hover.offsetWidth - 8);
      hover.style.left = `${Math.max(8, x)}px`;
      hover.style.top = `${event.pageY + 14}px`;
    });
    drawing.addEventListener("pointerleave", hide);

    for (const legend of box.querySelectorAll(".legend")) {
      const layer = legend.dataset.layer;
      for (const item of legend.children) {
        item.tabIndex = 0;
        item.setAttribute("role", "button");
        item.setAttribute("aria-pressed", "false");
        const toggle = () => {
          item.setAttribute("aria-pressed", item.getAttribute("aria-pressed") === "true" ? "false" : "true");
          const chosen = new Set([...legend.querySelectorAll("[aria-pressed=true]")].map((li) => li.dataset.class));
          for (const group of box.querySelectorAll(`.layer.${layer}`)) {
            group.classList.toggle("lit", chosen.size > 0);
            for (const dots of group.querySelectorAll(".dots")) dots.classList.toggle("on", chosen.has(dots.dataset.class));
          }
        };
        item.addEventListener("click", toggle);
        item.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          toggle();
        });
      }
    }
  }

  // --------------------------------------------------------------------------------------------- pictures
  const zoom = document.getElementById("zoom");
  if (zoom) {
    let shown = null;
    const tilesOf = (node) => [...node.closest(".card").querySelectorAll(".tiles-of button")];
    const show = (tile) => {
      shown = tile;
      const picture = zoom.querySelector("img");
      picture.hidden = !tile.firstElementChild.src; // a row without a picture
      if (!picture.hidden) picture.src = tile.firstElementChild.src;
      picture.className = tile.closest(".pixels") ? "pixels" : "";
      zoom.querySelector("bdi").textContent = (tile.innerText ? `${tile.innerText}\n` : "") + tile.title;
      if (!zoom.open) zoom.showModal();
    };
    const step = (by) => {
      const tiles = tilesOf(shown);
      show(tiles[(tiles.indexOf(shown) + by + tiles.length) % tiles.length]);
    };
    const arrows = { ArrowLeft: -1, ArrowRight: 1 };
    document.addEventListener("click", (event) => {
      const tile = event.target.closest(".tiles-of button");
      if (tile) show(tile);
      else if (event.target === zoom) zoom.close();
    });
    zoom.addEventListener("click", (event) => event.target.value && step(+event.target.value));
    zoom.addEventListener("keydown", (event) => arrows[event.key] && step(arrows[event.key]));
    zoom.addEventListener("close", () => shown.focus());
    for (const group of document.querySelectorAll(".tiles-of")) { // one stop of the Tab key for each group
      [...group.children].slice(1).forEach((tile) => { tile.tabIndex = -1; });
      group.addEventListener("keydown", (event) => {
        const tiles = tilesOf(group), next = tiles[tiles.indexOf(event.target) + arrows[event.key]];
        if (!next) return;
        event.preventDefault();
        next.focus();
      });
    }
  }

  // ------------------------------------------------------------------------------------------------ names
  const bar = document.querySelector(".save");
  if (bar && data.classes) {
    const [save, status] = [bar.querySelector("button"), bar.querySelector("[role=status]")];
    const entries = data.classes.entries.map(([index, name, label, kind, into]) => ({ index, name, label, kind, into }));
    const novel = entries.filter((c) => c.kind === "novel");
    const first = (c) => (c.into === null ? "drop" : c.into === c.index ? "keep" : String(c.into));
    const nameOf = (c) => (c.input ? c.input.value.trim() : c.name);
    const actionOf = (c) => (c.select ? c.select.value : "keep");
    // Anything but plain ASCII is spelled out, so that no name can break the line.
    const quoted = (text) => `"${[...text].map((c) => {
      const point = c.codePointAt(0);
      if (c === '"' || c === "\\") return `\\${c}`;
      return point >= 32 && point < 127 ? c : `\\U${point.toString(16).padStart(8, "0")}`;
    }).join("")}"`;
    const problem = () => {
      const names = new Map(entries.filter((c) => c.kind === "known").map((c) => [c.name, c]));
      for (const c of novel) {
        const name = nameOf(c), action = actionOf(c);
        if (!name || [...name].length > 300) return "Every class needs a name of 1 to 300 characters.";
        if (action !== "keep") continue;
        if (names.has(name)) return `Two classes are named “${name}”: merge one into the other, or rename it.`;
        names.set(name, c);
      }
      for (const c of novel) {
        const target = entries[actionOf(c)];
        if (target && actionOf(target) !== "keep") return `“${nameOf(c)}” is merged into a class that is itself merged or dropped.`;
      }
      return "";
    };
    const text = () => {
      const lines = ["# Names for the discovered classes, from the report. Put it in with: uno classes RUN --apply --file THIS",
        `model: ${quoted(data.classes.model)}`, "classes:"];
      for (const c of novel) {
        const target = entries[actionOf(c)];
        const action = target ? quoted(`merge into ${nameOf(target)}`) : actionOf(c);
        lines.push(`- index: ${c.index}`, `  name: ${quoted(nameOf(c))}`, `  action: ${action}`);
      }
      return `${lines.join("\n")}\n`;
    };
    const update = () => {
      for (const c of novel) {
        for (const option of c.select.options) {
          const target = entries[option.value];
          if (target) option.textContent = `merge into ${target.input ? nameOf(target) || target.label : target.label}`;
        }
      }
      const changes = novel.filter((c) => nameOf(c) !== c.name || actionOf(c) !== first(c)).length, wrong = problem();
      status.textContent = wrong || (changes ? `${changes} ${changes === 1 ? "class is" : "classes are"} changed.` : "Nothing is changed.");
      bar.classList.toggle("wrong", wrong !== "");
      bar.classList.toggle("changed", changes > 0);
      save.disabled = wrong !== "" || !changes;
    };
    for (const c of novel) {
      const place = document.querySelector(`.edit[data-index="${c.index}"]`);
      c.input = Object.assign(document.createElement("input"), { value: c.name, maxLength: 300, spellcheck: false });
      c.select = document.createElement("select");
      c.input.setAttribute("aria-label", `Name of ${c.label}`);
      c.select.setAttribute("aria-label", `What becomes of ${c.label}`);
      c.select.add(new Option("keep", "keep"));
      c.select.add(new Option("drop: reject its images", "drop"));
      for (const other of entries) if (other !== c) c.select.add(new Option("", String(other.index)));
      c.select.value = first(c);
      for (const field of [c.input, c.select]) field.addEventListener("input", update);
      if (place) place.append(c.input, c.select);
    }
    update();
    save.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text()], { type: "application/yaml" }));
      link.download = "classes.yaml";
      link.click();
      status.textContent = "Saved as classes.yaml. Now, with the place where it is:";
    });
  }

  // A link into a closed gallery opens it; printing opens everything.
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
  addEventListener("beforeprint", () => { for (const node of document.querySelectorAll("details")) node.open = true; });
})();
