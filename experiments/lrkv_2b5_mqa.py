"""The LRKV paper's MQA baseline at 2.5B.

36 layers, not the 18 of Table 5: families/lrkv.py says why.
"""

from experiments.families.lrkv import gqa, size_2b5

EXPERIMENT = size_2b5(gqa(18, num_kv_heads=1))
