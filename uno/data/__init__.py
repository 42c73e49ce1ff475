"""From what is on disk to batches. Modules in the order a row meets them::

sources.read_rows     files, tables and archives -> Rows: one id, image, label and split per row
splits.make_task      Rows -> Task: which classes are known, which rows training may see as labeled
decode.decode_many    encoded images -> uint8 (N,3,S,S), and why one has no pixels
resident.assemble     Task + images -> TrainSet, which holds no hidden label
plan.make_plan        which rows make batch number ``step``, as a pure function of the seed
check.check           what would go wrong, before anything starts
"""
