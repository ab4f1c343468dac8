"""Every field of a run, once: default, meaning, unit. Experiments import this and state only what differs.

A field whose default is `from_method(...)` takes its value from the row of `rpg_jax.losses.METHODS` that
`config.method` names; set it, in a file or on the command line, and it wins over the row.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from_method = placeholder  # an unset, typed field that the method's row fills in
optional = placeholder  # an unset, typed field that means "off" or "derived"


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.method = "RPG-REINFORCE-URKL"  # a row of the paper's tables; an unknown name lists the known ones
    c.seed = 0  # every random number of the run is folded from it

    run = c.run = ConfigDict()
    run.dir = "runs"  # folder of all runs, local or gs://BUCKET/FOLDER
    run.name = optional(str)  # default: config file, method, seed, and a hash of other overrides; same name = resume
    run.overwrite = False  # start anew where a run of this name exists
    run.compilation_cache = "runs/compilation_cache"  # JAX_COMPILATION_CACHE_DIR takes precedence; "" switches it off
    run.platform = optional(str)  # tpu, gpu or cpu: stop where there is none, never fall back; unset: what JAX finds
    run.stop_seconds = 25.0  # from SIGTERM or a preemption notice to the end of the process, at most; a step that does
    # not end within it is done again from the last checkpoint, so where steps take minutes, set checkpoint.every=1
    run.preemption_url = "http://metadata.google.internal/computeMetadata/v1/instance/preempted"  # on TPUs; "": off
    run.stall_seconds = 3600.0  # in which no group and no update ends, before all stacks are dumped and the run does;
    # more than one compilation or save, the log-prob passes of a step, or waiting for the slowest process may take

    distributed = c.distributed = ConfigDict()  # several processes; on TPU pods the launcher and JAX set all of it
    distributed.coordinator = optional(str)  # HOST[:PORT] of the first; unset: JAX_COORDINATOR_ADDRESS, or one process
    distributed.processes = optional(int)  # unset: JAX_NUM_PROCESSES, or what JAX finds
    distributed.process_id = optional(int)  # from 0; unset: JAX_PROCESS_ID, or what JAX finds
    distributed.initialization_timeout = 1800  # seconds to wait for the others to start
    distributed.heartbeat_timeout = 30  # seconds without a sign of life after which a process counts as lost

    model = c.model = ConfigDict()
    model.path = optional(str)  # weights and tokenizer in Hugging Face layout: a folder, gs://BUCKET/FOLDER, OWNER/NAME
    model.size = optional(str)  # of a published model, e.g. qwen3-0.6b, as plan and bench take it; train needs path too
    model.tokenizer = optional(str)  # a folder or address as path; unset: path, or one trained on the task's text
    model.num_layers = optional(int)  # decoder blocks
    model.embed_dim = optional(int)  # width of the residual stream
    model.num_heads = optional(int)  # of queries
    model.num_kv_heads = optional(int)  # of keys and values, each shared by num_heads / num_kv_heads queries
    model.head_dim = optional(int)  # of each head
    model.hidden_dim = optional(int)  # of the SwiGLU block
    model.rope_theta = optional(float)  # base of the rotary positions' wavelengths; unset: 1e6
    model.tie_embeddings = optional(bool)  # one matrix for input and output; unset: yes
    model.compute_dtype = "bfloat16"  # of activations and matrix products (those of float32 are not rounded, as TPUs
    # and newer GPUs do by default); log-probabilities and reductions are always float32
    model.param_dtype = "float32"  # of the master weights and the optimizer's slots; train takes no other, for in
    # bfloat16 nearly every update at a rate of 1e-6 rounds away; serve and evaluate hold a folder's in compute_dtype
    model.remat = "full"  # what the backward pass recomputes: none, dots, full, offload (layer inputs wait on the host)

    c.sharding = optional(str)  # changes to parallel.RULES, as "vocab=tensor+context,kv_heads="; no axis replicates
    c.offload = ""  # what waits in the host's memory until it is needed: optimizer, reference, or optimizer+reference

    mesh = c.mesh = ConfigDict()  # devices along each axis; -1 once: all that are left
    mesh.replica = 1  # copies of the weights, a multiple of the TPU slices, which only it spans; 1: one in each slice
    mesh.fsdp = -1  # batch and weights are cut alike; weights are gathered layer by layer
    mesh.tensor = 1  # heads, hidden units and vocabulary are cut
    mesh.context = 1  # sequences are cut along their length
    mesh.expert = 1  # experts of a mixture are spread, and rows with them

    task = c.task = ConfigDict()
    task.name = "arithmetic"  # arithmetic, or files: problems from data sources
    task.max_prompt_tokens = 16  # of a prompt, its chat template included
    task.too_long = "drop"  # a longer prompt: drop it, or truncate it on the left
    task.thinking = False  # of the model's chat template, where it has that switch
    task.generated = optional(int)  # problems of a procedural source; unset: all (arithmetic; with more than 3 digits
    # its share of 100,000) or 1000 (reasoning_gym, of each held-out set too)
    task.operations = "+"  # arithmetic: any of + - *
    task.digits = 2  # arithmetic: of each operand, at most; 1 to 9
    task.reverse = True  # arithmetic: write the answer's digits from the lowest, as one carries
    task.chain_of_thought = False  # arithmetic: write the column sums before the answer
    task.held_out = 0.2  # arithmetic: share of operand pairs kept for evaluation
    task.train = optional(str)  # files: parquet or JSONL files, hub names or reasoning_gym:NAME, separated by commas;
    # without the problems of the held-out sets
    task.held_out_sets = optional(str)  # files: NAME=SOURCE,...; arithmetic: of held out, carry, negative
    task.template = optional(str)  # files: paper, none, gsm8k, countdown, or a text with {question}; unset: the data's
    task.bad_rows = "fatal"  # files: fatal, or skip them; they are named either way

    rewards = c.rewards = ConfigDict()
    rewards.parts = "exact"  # exact math_dapo boxed math_verify gsm8k countdown by_source format length, or the user's
    # own module:function; several with weights: "math_dapo:1,format:0.1"; the first verifier decides accuracy
    rewards.deadline_seconds = 10.0  # for one verdict of math_verify or a user's function
    rewards.workers = optional(int)  # processes for those verdicts; unset: one per CPU, at most 8
    rewards.format = "number"  # what "format" asks for: answer_line, boxed, number, think
    rewards.overlong_shaping = from_method(bool)  # punish completions close to the limit (DAPO, arXiv:2503.14476)
    rewards.overlong_buffer = 512  # tokens before the limit over which the punishment grows
    rewards.overlong_factor = 1.0  # the punishment at the limit
    rewards.overlong_masking = False  # completions cut off by the limit are not trained

    rollout = c.rollout = ConfigDict()
    rollout.driver = "orchestrator"  # JetStream in process; lockstep: one thread, any mesh; simple: the plain oracle
    rollout.slots = 64  # completions decoded together, on all hosts; each takes an equal part
    rollout.tensor = optional(int)  # devices that share one copy of the decoding weights; unset: the trainer's mesh
    rollout.expert = optional(int)  # of a mixture: groups of experts in a copy, each on `tensor` devices
    rollout.devices = 0  # the last so many devices only sample, the mesh of the others trains; 0: all do both, by turns
    rollout.prompts_per_step = 64  # groups that a step trains
    rollout.group_size = 8  # completions per prompt
    rollout.max_tokens = 16  # of a completion, stop token included
    rollout.temperature = 1.0  # of sampling, and of the log-probs in the loss
    rollout.top_p = 1.0  # 1 is off
    rollout.top_k = 0  # 0 is off
    rollout.min_p = 0.0  # least probability of a token, as a share of the most probable one's; 0 is off
    rollout.overprovision = 0.0  # share of groups begun beyond those needed, of which the last to finish are cancelled:
    # no wait for the longest completions, at the price of a bias towards prompts with short ones
    rollout.max_staleness = 0  # steps that sampling may be ahead, on one device or on rollout.devices; 0: by turns
    rollout.swap = "between"  # ahead: when new weights sample; between batches (reproducible), or midway in completions
    rollout.int8 = False  # decode with matrices of 8 bits; set truncated_importance_sampling, widen max_sampler_gap
    rollout.int8_kv = False  # keep keys and values in 8 bits while decoding; the same advice
    rollout.max_sampler_gap = 5e-2  # mean |log pi_s - log pi_old| in nats above which the run stops; measured on
    # completions of the trainer's present weights: with max_staleness those of the first step, with swap=midway none

    dynamic = c.dynamic_sampling = ConfigDict()
    dynamic.enabled = from_method(bool)  # keep only groups whose raw accuracy is neither 0 nor 1
    dynamic.oversample = 1  # prompts generated at once, in units of prompts_per_step (the paper: 3)
    dynamic.max_batches = 20  # generation batches per step before giving up
    dynamic.on_shortage = "smaller"  # "smaller": train on what was kept; "error": stop
    dynamic.surplus = "drop"  # groups kept beyond a step's need: drop them, or carry them to the next step

    loss = c.loss = ConfigDict()
    loss.name = from_method(str)  # rpg ppo grpo reinforce_pp gspo cispo
    loss.divergence = from_method(str)  # fkl ufkl rkl urkl js ujs
    loss.estimator = from_method(str)  # differentiable reinforce
    loss.clip = from_method(str)  # none dual truncate reward
    loss.form = from_method(str)  # paper verl
    loss.kl_coef = from_method(float)  # beta
    loss.clip_low = from_method(float)  # epsilon_1
    loss.clip_high = from_method(float)  # epsilon_2
    loss.clip_dual = from_method(float)  # c; inf: no dual clip
    loss.kl_weighting = from_method(str)  # of grpo: none, as published; importance, the corrected one (errata 16)
    loss.kl_clamp = from_method(float)  # of grpo: bound of a token's published KL term, nats; unset: none; e.g. 10
    loss.aggregate = from_method(str)  # token_mean sequence_mean_token_sum sequence_mean_token_mean constant
    loss.constant_length = from_method(int)  # tokens, for aggregate = constant; default: rollout.max_tokens
    loss.truncated_importance_sampling = optional(float)  # cap C on pi_old/pi_s; unset: off
    loss.entropy_coef = 0.0  # weight of the entropy bonus, nats per token; at 0 it is not computed
    loss.advantage = from_method(str)  # a name of rpg_jax.losses.ADVANTAGES, or gae: from a critic

    critic = c.critic = ConfigDict()  # the learned baseline of loss.advantage = gae
    critic.trunk = "separate"  # a decoder of its own; frozen, shared: a head on the policy's, which trains it or not
    critic.gamma = 1.0  # discount, per token
    critic.gae_lambda = 1.0  # 1: returns minus value; 0: one-step errors
    critic.clip = 0.2  # a value counts as moved at most this far from the one before the update; 0 is off
    critic.coef = 0.5  # weight of the value loss; with Adam it matters where the trunk is shared
    critic.learning_rate = 1e-5  # of the critic's own weights; the rest as in optimizer

    reference = c.reference = ConfigDict()
    reference.rule = from_method(str)  # behaviour: every step; fixed: never; every: K updates; kl: at a threshold
    reference.every = 16  # K, in updates
    reference.kl_threshold = 0.01  # kappa, nats per token
    reference.kl_decay = 0.9  # of the moving average of the token KL, per update
    reference.resident = False  # keep the restored snapshot in device memory between steps

    train = c.train = ConfigDict()
    train.steps = 100  # rollout batches
    train.updates_per_step = 2  # mini-batches of one rollout batch
    train.epochs = 1  # passes over one rollout batch
    train.microbatch_size = optional(int)  # rows per forward and backward pass; unset: completions of a mini-batch
    train.packed_length = optional(int)  # tokens of a row that several completions share; unset: one a row, padded

    optimizer = c.optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw, schedule_free_adamw
    optimizer.learning_rate = 1e-6  # after the warm-up
    optimizer.warmup_updates = 10  # linear, then constant
    optimizer.b1 = 0.9  # decay of the gradient's mean; for schedule_free_adamw its interpolation
    optimizer.b2 = 0.999  # decay of the squared gradient's mean
    optimizer.eps = 1e-8  # added to the root of the squared gradient's mean
    optimizer.weight_decay = 0.1  # decoupled, times the learning rate
    optimizer.max_grad_norm = 1.0  # global norm

    warm = c.warm_start = ConfigDict()
    warm.enabled = False  # supervised training from scratch before RL; cached and shared between runs
    warm.dir = "runs/warm_starts"  # where warm starts are cached; if local, runs in a bucket use run.dir/warm_starts
    warm.seed = 0  # its own, so that runs of several seeds share one warm start
    warm.min_accuracy = 0.4  # stop inside [min_accuracy, max_accuracy] on held-out problems
    warm.max_accuracy = 0.6  # upper end of that range
    warm.max_tokens = optional(int)  # of a completion; unset: rollout.max_tokens. Set, runs of all limits share a start
    warm.learning_rate = 2e-3  # of AdamW
    warm.batch_size = 512  # pairs of prompt and answer an update
    warm.check_every = 50  # updates between accuracy checks; halved after an overshoot
    warm.max_updates = 5000  # before giving up

    evaluation = c.evaluation = ConfigDict()
    evaluation.every = 10  # steps, and before the first and after the last
    evaluation.problems = 256  # per held-out set, the first so many
    evaluation.k = 4  # completions per problem
    evaluation.temperature = 1.0  # 0 is greedy

    checkpoint = c.checkpoint = ConfigDict()
    checkpoint.every = 10  # steps, and after the last
    checkpoint.keep = 2  # of the newest
    checkpoint.permanent_every = optional(int)  # steps; checkpoints of its multiples stay for ever; unset: none does

    profile = c.profile = ConfigDict()
    profile.steps = optional(str)  # traced into the run folder: one, as 12, or a range, as 12-14

    log = c.log = ConfigDict()
    log.samples_per_step = 2  # prompts whose completions go to samples.jsonl
    log.rollouts_every = 10  # steps, and the first: groups with every token's numbers go to rollouts/, for the report's
    # browser, after one more pass of log-probs over the mini-batches that they are in; 0 is off
    log.rollouts_groups = 8  # of those steps, at most; up to 25 bytes a token on disk
    log.tensorboard = False  # event files in the run folder; needs pip install tensorboardX
    log.wandb = optional(str)  # project of Weights & Biases; needs pip install wandb
    log.wandb_mode = "online"  # online, offline (files in the run folder, to be synced later), disabled
    log.max_nonfinite_updates = 10  # in a row, before the run stops
    return c


def variant(c: ConfigDict, name: str) -> ConfigDict:
    """`c` itself, or for "tiny" (`--config=configs/x.py:tiny`) the same experiment in seconds on a CPU.

    Data, template, verifier, loss, packing and micro-batches stay. The weights are random and few, the tokens are
    characters, and no group can be informative, so dynamic sampling is off.
    """
    if name not in ("", "tiny"):
        raise ValueError(f"unknown variant {name!r} of a config; known: tiny")
    if not name:
        return c
    c.run.dir = "runs/tiny"
    c.model.path = c.model.size = None
    c.model.num_layers, c.model.embed_dim, c.model.hidden_dim = 2, 64, 128
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 4, 2, 16
    c.model.compute_dtype = "float32"
    c.task.max_prompt_tokens = min(c.task.max_prompt_tokens, 512)
    c.rollout.prompts_per_step, c.rollout.group_size, c.rollout.max_tokens = 4, 4, 16
    c.rollout.slots, c.rollout.tensor, c.rollout.expert = 32, None, None
    c.rewards.overlong_buffer = 8
    c.dynamic_sampling.enabled = False
    c.train.steps, c.train.updates_per_step, c.train.microbatch_size = 2, 2, 2
    c.train.packed_length = c.task.max_prompt_tokens + c.rollout.max_tokens  # of which short prompts fill a part
    c.evaluation.every, c.evaluation.problems, c.evaluation.k = 2, 4, 4
    c.checkpoint.every = 2
    return c
