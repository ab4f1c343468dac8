"""SmolLM2-135M-Instruct that has learnt sums teaches the one that has not, on the student's own completions.

Weights:   python -m launch.pretrained smollm2-135m
Teacher:   python -m rpg_jax.train --config=configs/smollm2_135m_sums.py --config.model.path=smollm2-135m
             --config.run.name=sums
           python -m rpg_jax.export --run=runs/sums --out=sums
Command:   python -m rpg_jax.train --config=configs/smollm2_135m_distilled.py --config.model.path=smollm2-135m
Hardware:  two CPU cores, 8 GB of memory
Expect:    0.10 to 0.15 held out before, 0.65 to 0.75 after eight steps, in six minutes; the teacher has 0.74
Rows:      OPD, OPD-EXACT, OPD-FKL, OPD-TO-GO, OPD-SEQ

The rewards have the weight 0: the KL to the teacher is all of the loss, and the accuracy is measured beside it. For a
teacher beside the rewards add --config.rewards.parts=examples.sums:last_number.
"""

from configs import base, smollm2_135m_sums


def get_config(variant: str = ""):
    c = smollm2_135m_sums.get_config()
    c.method = "OPD-EXACT"
    c.reference.path = "sums"
    c.rewards.parts = "examples.sums:last_number:0"
    return base.variant(c, variant)
