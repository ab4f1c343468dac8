"""Every field of a run, declared once: default, meaning, unit. Experiments import this and state only what differs.

A field whose default is `from_method(...)` takes its value from the row of `rpg_jax.losses.METHODS` that
`config.method` names. A value that is set in a file or on the command line wins over the row.
"""

from ml_collections import ConfigDict

from rpg_jax.runs.config_files import Field, Retired, Section, from_method, optional

# A field takes as few lines as its text.
# fmt: off
FIELDS = Section(
    "The run as a whole.",
    method=Field("RPG-REINFORCE-URKL", "A row of docs/methods.md: a loss and what belongs to it.",
        choices="rpg_jax.losses:METHODS"),
    seed=Field(0, "The seed of samples, of the order of problems and of new adapters. Random weights and the warm "
        "start have warm_start.seed.", range="[0, 1073741824)"),
    sharding=Field(optional(str), 'Changes to the rules in parallel.RULES, as "embed=fsdp+context,kv_heads=". A '
        "logical axis without a mesh axis is replicated."),
    offload=Field("", "The arrays that wait in the host's memory until they are needed.",
        choices=("", "optimizer", "reference", "optimizer+reference")),
    run=Section(
        "The run's folder and its process.",
        dir=Field("runs", "The folder of all runs: a local path or gs://BUCKET/FOLDER."),
        name=Field(optional(str), "The run's folder in run.dir. A run of the same name is continued. Unset: made of "
            "config file, method, the other overrides and seed, as tiny-grpo-lr3e-4-seed1."),
        start_from=Field(optional(str), "A new run begins where another run stood: runs/A@100 is after its step 100, "
            "runs/A after its last checkpoint. Weights, optimizer, step number, position in the problems and reference "
            "are taken over; docs/running.md."),
        overwrite=Field(False, "Start again: an earlier run of this name is moved to run.dir/replaced."),
        accept_changes=Field(False, "Go on although data, tokenizer, model or code of your own has changed since the "
            "run began. The new content counts from then on."),
        compilation_cache=Field(optional(str), "The folder that keeps compiled programs between runs. Unset: "
            '~/.cache/rpg_jax/compiled. JAX_COMPILATION_CACHE_DIR takes precedence. "" keeps none.'),
        platform=Field(optional(str), "The run stops where there is none of these. Unset: what JAX finds.",
            choices=("tpu", "gpu", "cpu", "cuda", "rocm")),
        stop_seconds=Field(25.0, "The longest time from SIGTERM to the end of the process. An "
            "unfinished step is done again from the last checkpoint, with the groups of checkpoint.journal_gib; where "
            "updates take minutes, set checkpoint.every=1.",
            "seconds", range="[0, 1e6]"),
        stall_seconds=Field(3600.0, "The longest time without progress: no group is completed, no update ends. After "
            "it the run writes the stacks of all threads to stall.txt and ends. Allow for one compilation, one save, "
            "the log-prob passes of a step, and the wait for the slowest process.", "seconds", range="(0, 1e9]"),
    ),
    distributed=Section(
        "The processes of one run. JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in a process's "
        "environment say which it is; on TPU pods the launcher and JAX set them.",
        heartbeat_timeout=Field(optional(int), "A process is lost after this long without a sign of life. Unset: JAX's "
            "own, 100.", "seconds", range="[1, 1e6]"),
    ),
    model=Section(
        "The policy's network.",
        path=Field(optional(str), "The folder of weights and tokenizer in Hugging Face layout: a local path, "
            "gs://BUCKET/FOLDER, or OWNER/NAME on the hub. Or a local FILE.gguf, which is converted once."),
        size=Field(optional(str), "The name of a published model, e.g. qwen3-0.6b or smollm2-135m. It "
            "gives the shapes, which is enough for plan and bench; train needs model.path too."),
        tokenizer=Field(optional(str), "The tokenizer's folder or address, as in model.path. Unset: model.path, or a "
            "tokenizer trained on the task's text."),
        num_layers=Field(optional(int), "The number of decoder blocks.", range="[1, 1000]"),
        embed_dim=Field(optional(int), "The width of the residual stream.", range="[1, 1e6]"),
        num_heads=Field(optional(int), "The number of query heads.", range="[1, 1e4]"),
        num_kv_heads=Field(optional(int), "The number of key-value heads; num_heads / num_kv_heads queries share one.",
            range="[1, 1e4]"),
        head_dim=Field(optional(int), "The width of a head.", range="[2, 1e4]"),
        hidden_dim=Field(optional(int), "The width of the SwiGLU block.", range="[1, 1e7]"),
        rope_theta=Field(optional(float), "The base of the wavelengths of the rotary positions. Unset: 1e6.",
            range="[1, 1e12]"),
        tie_embeddings=Field(optional(bool), "Use one matrix for input and output embeddings. Unset: True."),
        compute_dtype=Field("bfloat16", "The dtype of activations and matrix products. Products of float32 keep full "
            "precision, which TPUs and newer GPUs would round. Log-probabilities and reductions are always float32.",
            choices=("bfloat16", "float32")),
        param_dtype=Field("float32", "The dtype of master weights and optimizer slots. train takes float32 only: in "
            "bfloat16 nearly every update at a rate of 1e-6 rounds away. serve and evaluate hold a folder's weights in "
            "compute_dtype.", choices=("bfloat16", "float32")),
        remat=Field("full", "The activations that the backward pass computes again: none of them, all but matrix "
            "products (dots), or all (full). offload is full with the layers' inputs in the host's memory.",
            choices=("none", "dots", "full", "offload")),
        replay_experts=Field(False, "For a mixture: train with the experts that the sampler's routers chose for each "
            "token. Their weights are still the trainer's router's; docs/running.md. A token takes a byte for each of "
            "its experts in each layer (two if a layer has more than 256), in memory, checkpoints and the journal."),
        lora=Section(
            "Train low-rank adapters beside frozen weights, which are kept in compute_dtype; docs/lora.md.",
            rank=Field(0, "The rank of an adapter. 0: no adapters, all weights are trained.", range="[0, 1e5]"),
            alpha=Field(32.0, "An adapter's product has the factor alpha / rank.", range="(0, 1e6]"),
            targets=Field("all", "The matrices that get adapters.", choices="rpg_jax.models.lora:TARGETS"),
            path=Field(optional(str), "The folder of an adapter that the library peft has written: the run begins with "
                "it. Its rank, alpha and targets must be those here."),
            int8=Field(False, "Keep the frozen matrices of the layers in 8 bits, for training and for sampling."),
            merged=Field(False, "Sample with W + (alpha / rank) A B in place of W: faster steps of decoding, and one "
                "more copy of the weights. Otherwise the rollout multiplies by W and the adapter, as the trainer "
                "does, and shares W with it."),
        ),
    ),
    mesh=Section(
        "The number of devices along each axis of the mesh. One axis may be -1: it takes the remaining devices.",
        replica=Field(1, "Copies of the weights. Only this axis spans TPU slices, so it is a multiple of their number; "
            "1: one copy in each slice.", "devices", range="[-1, 1e6]"),
        fsdp=Field(-1, "Batch and weights are split alike; a layer's weights are gathered when it runs.", "devices",
            range="[-1, 1e6]"),
        tensor=Field(1, "Heads, hidden units and vocabulary are split.", "devices", range="[-1, 1e6]"),
        context=Field(1, "Sequences are split along their length.", "devices", range="[-1, 1e6]"),
        expert=Field(1, "The experts of a mixture are split, and rows with them.", "devices", range="[-1, 1e6]"),
    ),
    task=Section(
        "The problems that the policy is trained and evaluated on.",
        name=Field("arithmetic", "Generated problems, of one operation (arithmetic), of several that are worked out "
            "line by line (chains), or of a class of your own (module:Class, docs/environments.md); or problems from "
            "files (files)."),
        max_prompt_tokens=Field(16, "The longest prompt, chat template included.", "tokens", range="[1, 1048576]"),
        too_long=Field("drop", "A longer prompt is dropped, or truncated on the left.", choices=("drop", "truncate")),
        thinking=Field(False, "Switch on the thinking mode of a chat template that has one."),
        generated=Field(optional(int), "The number of problems of a procedural source. Unset: all of arithmetic (of "
            "more than three digits its share of 100,000), 50,000 chains, 1000 for each set of reasoning_gym.",
            "problems", range="[1, 1e9]"),
        operations=Field("+", "arithmetic and chains: any of + - *."),
        links=Field("5-8", "chains: FEWEST-MOST operations of a training problem."),
        digits=Field(2, "arithmetic: the most digits of an operand.", range="[1, 9]"),
        reverse=Field(True, "arithmetic: write the answer from its lowest digit, the order in which one carries."),
        held_out=Field(0.2, "Generated problems: the share that is kept for evaluation, of operand pairs, of chains or "
            "of whatever a class of your own splits.", range="(0, 1)"),
        train=Field(optional(str), "files: parquet or JSONL files, names of data sets on the hub or "
            "reasoning_gym:NAME, separated by commas. Problems of the held-out sets are left out."),
        held_out_sets=Field(optional(str), "files: NAME=SOURCE,NAME=SOURCE; arithmetic: held out,carry,negative or "
            "some of them; chains: held out,harder,old skill,train or some of them; module:Class: the names that it "
            "knows. Unset, for these three: held out."),
        template=Field(optional(str), "files: the prompt's template: paper, none, gsm8k, countdown, or a text with "
            "{question}. Unset: a prompt of the data stays as it is, a bare question is put into the paper's, or into "
            "that of its data set (gsm8k, countdown)."),
        bad_rows=Field("fatal", "files: a bad row is fatal, or skipped. A line counts bad rows and has the first.",
            choices=("fatal", "skip")),
    ),
    rewards=Section(
        "The reward of a completion: a weighted sum of parts.",
        parts=Field(optional(str), "Any of exact, math_dapo, boxed, math_verify, gsm8k, countdown, by_source, format, "
            'length, environment (the section environment), judge (the section judge), or a function of your own as '
            'module:function. Several take weights: "math_dapo:1,format:0.1". Unset: environment where there is one, '
            "else exact."),
        accuracy=Field(optional(str), "The part that decides accuracy; it need not be among the parts. Unset: the "
            "first verifier among them."),
        right_above=Field(optional(float), "A completion is right where that part's score is above this. Unset: where "
            "it is 1, and the part scores 1, 0 or -1 only. A judge, and whatever else grades, needs it.",
            range="[-1e6, 1e6]"),
        deadline_seconds=Field(10.0, "The longest time for one verdict of math_verify or of your own function, and "
            "for one answer of an environment.", "seconds", range="(0, 3600]"),
        workers=Field(optional(int), "The processes for those verdicts, and as many for an environment's answers. "
            "Unset: one per CPU, at most 8.", "processes", range="[1, 1000]"),
        max_failures=Field(0.25, "The share of a step's completions that may lack a verdict because a verifier, a "
            "judge or an environment has failed twice. They are not trained. A run with more of them ends.",
            "of the completions", range="[0, 1]"),
        format=Field("number", 'The form that the part "format" asks for.',
            choices="rpg_jax.rewards.verifiers:FORMATS"),
        overlong_shaping=Field(from_method(bool), "Punish completions close to the limit (DAPO, arXiv:2503.14476). The "
            "tokens of an environment do not count. rpg_jax.train(reward=) without a method has none."),
        overlong_buffer=Field(optional(int), "The number of tokens before the limit over which the punishment grows. "
            "Unset: a quarter of rollout.max_tokens and at most 512, as the paper has 512 of 2048.", "tokens",
            range="[0, 1048576]"),
        overlong_masking=Field(False, "Do not train on completions that a limit ends: rollout.max_tokens, or of an "
            "environment turn_tokens or max_turns."),
    ),
    judge=Section(
        'A judge or a reward model over HTTP: the part "judge" of rewards.parts.',
        url=Field(optional(str), "The server, as http://localhost:8000/v1, or the address of a scoring endpoint."),
        kind=Field("chat", "chat: a model is asked by /chat/completions and its last line holds the grade. score: a "
            "POST of {model, prompts, completions, answers} returns {scores}.", choices=("chat", "score")),
        model=Field("default", "The model's name, as the server's list (/v1/models) has it."),
        prompt=Field("", "chat: the question to the judge, with {completion}, and {prompt}, {answer} and {scale} where "
            'they are wanted. "": a grade from 0 to the scale, with question and reference answer.'),
        scale=Field(10.0, "chat: the highest grade; the score is the grade's share of it.", range="(0, 1e6]"),
        max_tokens=Field(256, "chat: the longest reply.", "tokens", range="[1, 1048576]"),
        batch=Field(16, "score: the completions of a request.", "completions", range="[1, 1e5]"),
        parallel=Field(16, "The requests that are under way at once.", "requests", range="[1, 1000]"),
        deadline_seconds=Field(60.0, "The longest time for a request and all its retries.", "seconds",
            range="(0, 3600]"),
    ),
    environment=Section(
        "An environment answers the policy's turns: a completion is a conversation. docs/environments.md.",
        name=Field(optional(str), "One that ships, or module:name, a class of your own. Unset: a completion is one "
            "turn."),
        options=Field("{}", 'The keywords that it is made with, as JSON: {"high": 50}.'),
        max_turns=Field(8, "The most turns of the policy. The last one is paid for and not answered.", "turns",
            range="[1, 1e5]"),
        turn_tokens=Field(optional(int), "The longest turn, stop token included. A longer one ends the conversation. "
            "Unset: rollout.max_tokens, which limits the conversation with all observations.", "tokens",
            range="[1, 1048576]"),
        in_process=Field(False, "Call it in this process and not in workers: it may then be async, keep state and use "
            "the network, and nothing can stop it."),
    ),
    rollout=Section(
        "How completions are sampled.",
        driver=Field("orchestrator", "The driver of the decoding engine: JetStream's threads (orchestrator) or one "
            "thread on any mesh (lockstep). servers: servers with OpenAI's completions sample, this project's own or "
            "vLLM's; docs/servers.md.",
            choices="rpg_jax.rollout:DRIVERS"),
        slots=Field(optional(int), "Completions decoded together on each device. Unset: as many as its memory holds "
            "beside everything else; 128 on all devices of a process together where that is not known, as on a CPU.",
            "completions", range="[1, 1e6]"),
        threads=Field(1, "The threads that decode, each its share of the slots. One program seldom uses two cores of a "
            "CPU, so a run with idle cores samples faster with two. Other devices need one.", range="[1, 1000]"),
        tensor=Field(optional(int), "Devices per copy of the decoding weights. Unset: 1 with rollout.expert or "
            "rollout.devices, else the trainer's mesh.", "devices", range="[1, 1e6]"),
        expert=Field(optional(int), "For a mixture: groups of experts per copy, each on `tensor` devices.", "groups",
            range="[1, 1e6]"),
        devices=Field(0, "The number of devices that only sample: the last ones. The mesh covers the others, which "
            "train. 0: every device samples and trains in turn.", "devices", range="[0, 1e6]"),
        prompts_per_step=Field(64, "The groups that a step trains on.", "groups", range="[1, 1e6]"),
        group_size=Field(8, "The completions of a prompt.", "completions", range="[1, 1e5]"),
        max_tokens=Field(16, "The longest completion, stop token included.", "tokens", range="[1, 1048576]"),
        temperature=Field(1.0, "The temperature of sampling, and of the log-probabilities in the loss.",
            range="[0.01, 100]"),
        top_p=Field(1.0, "Sample from the most probable tokens that hold this probability. 1 is off. Training takes no "
            "cut, top_p, top_k or min_p; evaluate, sample and serve do.", range="(0, 1]"),
        top_k=Field(0, "Sample from this many most probable tokens. 0 is off.", "tokens", range="[0, 1e6]"),
        min_p=Field(0.0, "The least probability of a token, as a share of the most probable token's. 0 is off.",
            range="[0, 1)"),
        max_staleness=Field(0, "The steps that sampling may run ahead of training, on one device, on rollout.devices "
            "or on servers. 0: they alternate.", "steps",
            range="[0, 1000]"),
        partial_tokens=Field(optional(int), "The most tokens of a completion that a step draws; later steps draw the "
            "rest under their weights, and no step waits for its longest completion. Unset: whole completions.",
            "tokens", range="[1, 1048576]"),
        int8=Field(False, "Decode with 8-bit matrices; set loss.sampler_correction, raise max_sampler_gap."),
        int8_kv=Field(False, "Keep keys and values in 8 bits while decoding. The same advice applies."),
        max_sampler_gap=Field(optional(float), "The run stops above this mean |log pi_s - log pi|, pi being the "
            "weights that sampled in the trainer's numerics. Unset: 1e-4 if all is computed in float32; otherwise "
            "0.08, with a warning above 0.04. With max_staleness the trainer has them in the first step only.",
            "nats", range="(0, inf]"),
    ),
    servers=Section(
        "rollout.driver=servers: who samples, and how the weights get there; docs/servers.md.",
        urls=Field("", "The servers, as http://HOST:PORT,http://HOST:PORT. Each is one server, not a balancer before "
            "several: every one is told to load the weights. Servers that come and go: dns://NAME:PORT for all "
            "addresses of a name, or file:PATH for the lines of a file or of a folder's files, read every 5 seconds."),
        kind=Field("vllm", "The servers' program.", choices="rpg_jax.rollout.servers.server:KINDS"),
        model=Field(optional(str), "The name under which they have the model. Unset: it is their only one."),
        weights=Field(optional(str), "The folder into which the trainer writes the weights of every step. All servers "
            "see it under the same path."),
        parallel=Field(256, "The completions that a process asks one server for at once. The server decodes as many as "
            "it has slots, and should have room to let the others wait.", "completions", range="[1, 4096]"),
        timeout_seconds=Field(1800.0, "The longest time for one completion, its wait inside the server included, and "
            "for loading the weights.", "seconds", range="(0, 1e6]"),
        patience_seconds=Field(600.0, "The run stops after so long without any server that answers.", "seconds",
            range="(0, 1e6]"),
        certificate=Field(optional(str), "PEM file to trust for https addresses. Unset: the text of the variable "
            "RPG_JAX_CERTIFICATE, else the system's."),
        certificate_name=Field(optional(str), "The name in the servers' certificate. Unset: the host of each address."),
    ),
    dynamic_sampling=Section(
        "Prompts are drawn until a step has enough informative groups.",
        enabled=Field(from_method(bool), "Keep only groups whose completions differ in reward, its shaping left out."),
        oversample=Field(1, "The prompts that are generated at once, in units of prompts_per_step. The paper has 3. 0: "
            "as many as should fill the step, by the share of informative groups so far.", range="[0, 1000]"),
        max_batches=Field(20, "The most generation batches of a step, which then trains the informative groups that "
            "it has; without any the run ends.", "batches", range="[1, 1e6]"),
        surplus=Field("drop", "Drop surplus groups, or carry them to the next step.", choices=("drop", "carry")),
    ),
    loss=Section(
        "The loss of a token and its mean over a batch; docs/methods.md has the equations.",
        name=Field(from_method(str), "The loss, or a function of your own as module:function (docs/library.md).",
            choices="rpg_jax.losses:LOSSES"),
        arguments=Field(from_method(str), 'Hyperparameters of the loss that have no field here, as JSON: '
            '{"tau": 0.5}. Of the shipped losses: weight_cap, trace_cap, behaviour_mass of rpg, kl_clamp of '
            "grpo, mask_divergence, mask_threshold of dppo, width_low, width_high, width_dual of ctpo, trust_region of "
            "drpo, tau_positive, tau_negative of sapo, penalty_level of opmd; docs/methods.md."),
        divergence=Field(from_method(str), "rpg: the divergence.", choices="rpg_jax.losses:DIVERGENCES"),
        estimator=Field(from_method(str), "rpg: the gradient's estimator. exact: the KL at a token's prefix is summed "
            "over the vocabulary, which takes the reference's weights to every update; for level token and to_go.",
            choices=("differentiable", "reinforce", "exact")),
        clip=Field(from_method(str), "rpg: the clip of the importance ratio.",
            choices=("none", "dual", "dual_through", "truncate", "reward")),
        form=Field(from_method(str), "rpg: the paper's formulas, or the public code's.", choices=("paper", "verl")),
        level=Field(from_method(str), "rpg: the sample of the objective: a token given its prefix, or a completion, by "
            "its regularized return (sequence) or by the chain rule (to_go). docs/methods.md: what completions need.",
            choices=("token", "sequence", "to_go")),
        weight=Field(from_method(str), "rpg of completions: the importance weight: the token's ratio, the "
            "completion's (product: exact, without a clip), the same capped, or none.",
            choices=("token", "product", "capped", "none")),
        kl_ratio=Field(from_method(str), "rpg, level=sequence: the policy whose log-ratio to the reference is in the "
            "return: the present one, or that of the rollout (behaviour: KL in the reward).",
            choices=("present", "behaviour")),
        trace_decay=Field(from_method(float), "rpg, level=to_go: the decay lambda per token of the KL to come.",
            range="[0, 1]"),
        kl_coef=Field(from_method(float), "The coefficient beta of the KL term.", range="[0, inf)"),
        clip_low=Field(from_method(float), "epsilon_1: the importance ratio is clipped below 1 - epsilon_1.",
            range="[0, 1)"),
        clip_high=Field(from_method(float), "epsilon_2: the importance ratio is clipped above 1 + epsilon_2.",
            range="[0, inf)"),
        clip_dual=Field(from_method(float), "The bound c of the dual clip. inf: no dual clip.", range="(1, inf]"),
        kl_weighting=Field(from_method(str), "grpo: the weight of the KL term: none, as published, or the importance "
            "ratio, as corrected (errata 16).", choices=("none", "importance")),
        aggregate=Field(from_method(str), "The mean of the tokens' losses.", choices="rpg_jax.losses:AGGREGATES"),
        constant_length=Field(from_method(int), "The length for aggregate=constant. Unset: rollout.max_tokens.",
            "tokens", range="[1, 1048576]"),
        sampler_correction=Field(from_method(str), "What makes up for tokens that the sampler's numerics drew: pi_s, "
            "not pi_old. docs/methods.md has the formulas. Unset: nothing.",
            choices="rpg_jax.losses:SAMPLER_CORRECTIONS"),
        sampler_low=Field(optional(float), "The lower bound l of the sampler correction. Unset: the correction's own.",
            range="[0, inf)"),
        sampler_high=Field(optional(float), "Its upper bound h. Unset: the correction's own.", range="(0, inf]"),
        entropy_coef=Field(0.0, "The weight of the entropy bonus, nats per token. 0 is off.", range="[0, inf)"),
        advantage=Field(from_method(str), "The advantage, or a function of your own as module:function. gae needs a "
            "critic.",
            choices="rpg_jax.losses:ADVANTAGES,LEARNED_ADVANTAGES"),
        credit=Field("completion", "What a turn of a conversation is given credit for: the reward of the whole "
            "completion, or what an environment paid from the turn on (turn), compared with the group's completions "
            "at the same turn. A critic learns from what is paid at the end, or turn by turn.",
            choices="rpg_jax.training.objective:CREDITS"),
    ),
    critic=Section(
        "The learned baseline of loss.advantage=gae.",
        gamma=Field(1.0, "The discount per token.", range="[0, 1]"),
        gae_lambda=Field(1.0, "The lambda of GAE. 1: returns minus values; 0: one-step errors.", range="[0, 1]"),
        learning_rate=Field(1e-5, "The learning rate of the critic's own weights. The rest is as in optimizer.",
            range="[0, 100]"),
    ),
    reference=Section(
        "The policy that anchors the KL term.",
        rule=Field(from_method(str), "When the reference moves to the present policy: every step (behaviour), never "
            "(fixed), every K steps or updates (every), or when the KL passes a threshold (kl); or a teacher is the "
            "reference. Unset with reference.path: teacher.",
            choices="rpg_jax.training.reference:RULES"),
        every=Field("1 step", "K of rule=every: every K-th step, when it ends, or every K-th update.",
            "steps or updates"),
        kl_threshold=Field(0.01, "kappa of rule=kl.", "nats per token", range="(0, inf)"),
        path=Field(optional(str), "A teacher, which rule=teacher takes as the reference: a model of any supported "
            "family with the policy's tokenizer, as in model.path. It is held in model.compute_dtype. Or its "
            "servers, as in servers.urls with a list: vLLM or rpg_jax.serve, which give its log-probs."),
        resident=Field(False, "Keep the reference's weights in device memory between steps. A teacher's always stay, "
            "unless offload names the reference."),
    ),
    rehearsal=Section(
        "Completions of the start policy, which every update trains on beside its mini-batch: the forward KL "
        "KL(pi_start || pi_theta). docs/methods.md.",
        path=Field(optional(str), "The folder of an evaluation of the start policy: its completions of the problems "
            "of which every completion is right. An update takes one for each prompt of its mini-batch. Unset: none."),
        coef=Field(0.0, "The weight lambda of their mean negative log-probability, nats per token.", range="[0, inf)"),
    ),
    train=Section(
        "Steps and batches. A step samples one rollout batch and trains on it.",
        steps=Field(100, "The number of steps.", "steps", range="[0, 1e9]"),
        updates_per_step=Field(2, "The mini-batches of a rollout batch, one update each.", "updates", range="[1, 1e5]"),
        epochs=Field(1, "The passes over a rollout batch.", range="[1, 1e4]"),
        microbatch_size=Field(optional(int), "Rows of a forward and backward pass. Unset: as many as fit the "
            "memory of a device by arithmetic, and few enough that packed rows are full; where the memory is unknown "
            "(CPU), a mini-batch, or few packed rows.", "rows", range="[1, 1e6]"),
        packed_length=Field(optional(int), "The length of a row that several completions share. Completions of one "
            "prompt then have the prompt's tokens once in a row, except on TPUs. Unset: one completion a row, padded.",
            "tokens", range="[2, 1e7]"),
    ),
    optimizer=Section(
        "The optimizer of the policy.",
        name=Field("adamw", "The optimizer, by optax's name. Those that read whole matrices (adafactor, lamb, muon) "
            "are not among them.", choices="rpg_jax.training.optimizer:NAMES"),
        learning_rate=Field(from_method(float), "The learning rate after the warm-up.", range="[0, 100]"),
        schedule=Field("constant", "The learning rate after the warm-up: constant, or falling on a line (linear) or on "
            "half a cosine (cosine).", choices="rpg_jax.training.optimizer:SCHEDULES"),
        decay_until=Field(optional(str), "The length of a falling schedule, warm-up included. Unset: train.steps. A "
            "longer run of the same name needs it set.", "steps or updates"),
        final_rate=Field(0.0, "Where a falling schedule ends, as a share of the learning rate.", range="[0, 1]"),
        warmup=Field("10 steps", "The warm-up. Over N steps: a stair, the updates of step s "
            "= 0, 1, ... have s/N of the rate, so those of the first step have none. Over N updates: a slope, update u "
            "= 1, 2, ... has u/N of the rate.", "steps or updates"),
        b1=Field(0.9, "The decay of the gradient's mean. For sgd: its momentum; for schedule_free_adamw: its "
            "interpolation, at least 0.1.", range="[0, 1)"),
        b2=Field(0.999, "The decay of the squared gradient's mean. For lion: of the gradient's mean, which b1 mixes "
            "with the gradient.", range="[0, 1)"),
        eps=Field(1e-8, "The number that is added to the root of the squared gradient's mean. rmsprop adds it under "
            "the root; lion and sgd do not read it.", range="[0, 1]"),
        weight_decay=Field(0.1, "The decoupled weight decay. It is multiplied by the learning rate.", range="[0, 100]"),
        decayed=Field("all", "The weights that weight decay shrinks: all, or matrices only (no norms, no biases).",
            choices="rpg_jax.training.optimizer:DECAYED"),
        max_grad_norm=Field(1.0, "The largest global norm of the gradient; a longer gradient is scaled down.",
            range="(0, inf]"),
    ),
    warm_start=Section(
        "Supervised training on demonstrations: before RL, where runs share the result, or alone (rpg_jax.sft).",
        enabled=Field(False, "Begin with a warm start."),
        train=Field(optional(str), "Files with demonstrations, as task.train. Unset: those of task.train; generated "
            "tasks write their own."),
        epochs=Field(optional(int), "The passes over the demonstrations. Unset: a warm start ends at an accuracy, "
            "rpg_jax.sft after 3.", range="[1, 1e6]"),
        dir=Field("runs/warm_starts", "The folder that keeps warm starts. Runs in a bucket use run.dir/warm_starts "
            "instead of a local folder."),
        seed=Field(0, "The seed of random weights and of the warm start, which runs of several seeds share.",
            range="[0, 1073741824)"),
        min_accuracy=Field(0.4, "The least accuracy on the first held-out set at which the warm start stops.",
            range="[0, 1]"),
        max_accuracy=Field(0.6, "The greatest accuracy at which it stops.", range="[0, 1]"),
        max_tokens=Field(optional(int), "The longest completion. Unset: rollout.max_tokens. Where it is set, runs with "
            "other limits share the warm start.", "tokens", range="[1, 1048576]"),
        learning_rate=Field(2e-3, "The learning rate of its AdamW, after a warm-up of 20 updates.", range="[0, 100]"),
        schedule=Field("constant", "The learning rate after the warm-up, as optimizer.schedule; a falling one ends "
            "with the last pass and needs warm_start.epochs.", choices="rpg_jax.training.optimizer:SCHEDULES"),
        batch_size=Field(512, "The rows of an update: demonstrations, or with train.packed_length as many to a row as "
            "fit. train.microbatch_size, where it is set, is that of supervised training too.", "rows",
            range="[1, 1e6]"),
        check_every=Field(50, "The updates between checks; halved after an overshoot.", "updates", range="[1, 1e9]"),
    ),
    evaluation=Section(
        "Evaluations on the held-out sets.",
        every=Field(10, "Steps between evaluations; also before the first and after the last.", "steps",
            range="[1, 1e12]"),
        problems=Field(256, "The number of problems of each held-out set: the first ones.", "problems",
            range="[1, 1e9]"),
        k=Field(4, "The completions of each problem.", "completions", range="[1, 1e5]"),
        temperature=Field(1.0, "The temperature of sampling. 0 is greedy.", range="[0, 100]"),
        drift=Field(False, "Also measure the completions' entropy, in nats per token, and KL to the policy before the "
            "first step, in nats per completion. Two more passes of log-probabilities. evaluation.temperature must be "
            "rollout.temperature."),
    ),
    checkpoint=Section(
        "Checkpoints, from which the same command continues.",
        every=Field(10, "Steps between checkpoints; also after the last.", "steps", range="[1, 1e12]"),
        keep=Field(2, "The number of checkpoints that are kept: the newest ones.", "checkpoints", range="[1, 1e6]"),
        journal_gib=Field(4.0, "The most that each host keeps of the groups that were completed after the newest "
            "checkpoint. A run that continues samples only what is missing there. Beyond it no group is kept until the "
            "next checkpoint. A token takes 8 bytes. 0 is off.", "GiB", range="[0, 1e6]"),
        permanent_every=Field(optional(int), "Checkpoints at its multiples stay for ever. Unset: none.", "steps",
            range="[1, 1e12]"),
    ),
    profile=Section(
        "Traces for TensorBoard or Perfetto.",
        steps=Field(optional(str), "The steps that are traced into the run folder: one, as 12, or a range, as 12-14."),
    ),
    log=Section(
        "What a run writes about itself.",
        samples_per_step=Field(2, "The prompts of a step whose completions go to samples.jsonl.", "prompts",
            range="[0, 1e6]"),
        rollouts_every=Field(10, "The steps between two records in rollouts/: groups with the numbers of every token, "
            "for the report's browser. The first step is recorded too. A record has 8 groups "
            "and costs one more pass of log-probabilities over their mini-batches (with one update a step also the "
            "passes before it, which other steps leave out); a token takes up to 25 bytes. 0 is off.", "steps",
            range="[0, 1e12]"),
        tracker=Field("", "Where metrics go too: tensorboard, wandb, mlflow or trackio, or several, separated by "
            "commas. Each needs its package: pip install tensorboardX, wandb, mlflow or trackio."),
        project=Field("rpg_jax", "The project (wandb, trackio) or experiment (mlflow) of the run."),
    ),
)
# fmt: on


_FLEET = {
    "host": "the flag --host of rpg_jax.serve",
    "port": "the flag --http_port of rpg_jax.serve",
    "advertise": "the flag --announce=FOLDER of rpg_jax.serve, and servers.urls=file:FOLDER",
    "certificate": "the flag --certificate of rpg_jax.serve, and servers.certificate",
    "private_key": "the flag --private_key of rpg_jax.serve",
    "key_file": "the flag --api_key_file of rpg_jax.serve, and the variable RPG_JAX_SERVERS_KEY",
    "lost_seconds": "nothing: a server that does not answer is asked for its health",
    "stall_seconds": "servers.timeout_seconds",
}
_MOVED = {
    "loss.weight_cap": '{"weight_cap": 2.0}',
    "loss.trace_cap": '{"trace_cap": Infinity}',
    "loss.kl_clamp": '{"kl_clamp": 10.0}',
    "loss.mask_divergence": '{"mask_divergence": "kl"}',
    "loss.mask_threshold": '{"mask_threshold": 0.1}',
    "loss.tau_positive": '{"tau_positive": 1.0}',
    "loss.tau_negative": '{"tau_negative": 1.05}',
    "loss.penalty_level": '{"penalty_level": "token"}',
}
_GONE = {
    "distributed.coordinator": "set the variable JAX_COORDINATOR_ADDRESS",
    "distributed.processes": "set the variable JAX_NUM_PROCESSES",
    "distributed.process_id": "set the variable JAX_PROCESS_ID",
    "distributed.initialization_timeout": "processes wait half an hour for the others to start",
    "run.preemption_url": "a machine that is preempted sends SIGTERM",
    "judge.attempts": "a request is sent up to four times within judge.deadline_seconds",
    "judge.cache": "100,000 verdicts are remembered",
    "judge.key_variable": "put the key into the variable JUDGE_API_KEY",
    "environment.deadline_seconds": "rewards.deadline_seconds holds for an environment's answers too",
    "environment.workers": "rewards.workers holds for environments too",
    "servers.key_variable": "put the key into the variable RPG_JAX_SERVERS_KEY",
    "dynamic_sampling.on_shortage": "too few groups make a smaller batch",
    "log.rollouts_groups": "a record has 8 groups",
    "log.wandb_mode": "set the variable WANDB_MODE to offline or disabled",
    "log.routing_every": "the experts of sampler and trainer are not compared; sampler_gap has what they cost",
    "log.max_nonfinite_updates": "a run stops after 10 non-finite updates in a row",
    "warm_start.max_updates": "a warm start gives up after 20,000 updates",
}
RETIRED = (
    Retired(
        "rollout.driver",
        "2026-11-24",
        "start servers with `python -m rpg_jax.serve --config=… --http_port=8000 "
        "--weights_from=FOLDER` and write --config.rollout.driver=servers --config.servers.kind=rpg_jax "
        "--config.servers.urls=http://HOST:8000 --config.servers.weights=FOLDER; a run of a fleet goes on so under its "
        "--config.run.name (docs/servers.md)",
        value="fleet",
        successor="servers",
    ),
    Retired(
        "rollout.driver",
        "2026-11-24",
        "write --config.rollout.driver=lockstep, which draws the same tokens; a run of the simple driver goes on so "
        "under its --config.run.name",
        value="simple",
        successor="lockstep",
    ),
    *(
        Retired(f"fleet.{name}", "2026-11-24", f"{now} took its place (docs/servers.md)")
        for name, now in _FLEET.items()
    ),
    *(
        Retired(name, "2026-11-24", f"write --config.loss.arguments='{example}'", into="loss.arguments")
        for name, example in _MOVED.items()
    ),
    *(Retired(name, "2026-11-24", instead) for name, instead in _GONE.items()),
    Retired("model.lora.initializer", "2026-11-24", "A is drawn uniformly", fixed="uniform"),
    Retired("reference.kl_decay", "2026-11-25", "the moving average of the KL decays by 0.9 per update", fixed=0.9),
    Retired("rewards.overlong_factor", "2026-11-24", "the punishment at the limit is 1", fixed=1.0),
    Retired(
        "rollout.overprovision",
        "2026-11-25",
        "a step waits for all its groups; rollout.max_staleness and rollout.partial_tokens shorten the wait",
        fixed=0.0,
    ),
    Retired("rollout.swap", "2026-11-26", "new weights take over between two batches", fixed="between"),
    Retired("critic.trunk", "2026-11-26", "the critic has a decoder of its own", fixed="separate"),
    Retired("critic.clip", "2026-11-26", "the value loss clips a value to within 0.2 of the old value", fixed=0.2),
    Retired("critic.coef", "2026-11-26", "the value loss has the weight 0.5", fixed=0.5),
    Retired("task.chain_of_thought", "2026-11-25", "task.name=chains has working to write", fixed=False),
    *(
        Retired(
            f"{section}.name",
            "2026-11-24",
            f"write --config.{section}.name={now}, which stands in examples/{game}.py (docs/environments.md)",
            value=game,
            successor=now,
        )
        for game in ("guessing", "calculator")
        for section, now in (("task", f"examples.{game}:Problems"), ("environment", f"examples.{game}:Game"))
    ),
)
"""Fields and values of earlier versions."""


_READERS = {
    "task.links": {"task.name": "chains"},
    "task.digits task.reverse": {"task.name": "arithmetic"},
    "task.operations": {"task.name": "arithmetic|chains"},
    "task.held_out": {"task.name": "arithmetic|chains|:"},
    "task.train": {"task.name": "files"},
    "task.template task.bad_rows": {"task.name": "files", "warm_start.train": "."},
    "rewards.format": {"rewards.parts": "format"},
    "rewards.overlong_buffer": {"rewards.overlong_shaping": "."},
    "judge": {"rewards.parts": "judge", "rewards.accuracy": "judge"},
    "judge.batch": {"judge.kind": "score"},
    "environment": {"environment.name": "."},
    "environment.max_turns": {"environment.name": ".", "task.name": ":"},
    "servers": {"rollout.driver": "servers", "reference.path": "http"},
    "servers.weights servers.urls": {"rollout.driver": "servers"},
    "dynamic_sampling.oversample dynamic_sampling.max_batches dynamic_sampling.surplus": {
        "dynamic_sampling.enabled": "."
    },
    "critic": {"loss.advantage": "gae"},
    "reference.every": {"reference.rule": "every"},
    "reference.kl_threshold": {"reference.rule": "kl"},
    "reference.resident": {"reference.rule": "fixed|every|kl"},
    "optimizer.decay_until optimizer.final_rate": {"optimizer.schedule": "linear|cosine"},
    "optimizer.b1": {"optimizer.name": "adam|lion|sgd"},
    "optimizer.b2": {"optimizer.name": "adam|lion|rmsprop"},
    "optimizer.eps": {"optimizer.name": "adam|rmsprop"},
    "optimizer.decayed": {"optimizer.weight_decay": "."},
    "warm_start.train warm_start.epochs warm_start.max_tokens warm_start.batch_size": {"warm_start.enabled": "."},
    "warm_start.learning_rate warm_start.schedule warm_start.check_every": {"warm_start.enabled": "."},
    "warm_start.min_accuracy warm_start.max_accuracy": {"warm_start.enabled": "."},
    "model.lora.alpha model.lora.targets model.lora.int8 model.lora.merged": {"model.lora.rank": "."},
    "model.rope_theta model.tie_embeddings": {"model.path": ""},
    "model.num_layers model.embed_dim model.hidden_dim": {"model.path": ""},
    "model.num_heads model.num_kv_heads model.head_dim": {"model.path": ""},
    "log.project": {"log.tracker": "wandb|mlflow|trackio"},
}
READ_WITH = {
    field: needed
    for names, needed in _READERS.items()
    for field, _ in FIELDS.fields()
    if field in names.split() or field.partition(".")[0] in names.split()
}
"""Fields that some runs do not read, although configs may set them for all: {field: {other field: words}}. A run reads
the field if the text of one of the other fields has one of the words: "." is any text, "" is a field that is unset."""


def get_config() -> ConfigDict:
    """A config with every field at its default. It takes no other field."""
    return FIELDS.make_config().lock()


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
    c.rollout.slots, c.rollout.threads, c.rollout.tensor, c.rollout.expert = None, 1, None, None
    c.rewards.overlong_buffer = 8
    c.dynamic_sampling.enabled = False
    c.train.steps, c.train.updates_per_step, c.train.microbatch_size = 2, 2, 2
    c.train.packed_length = c.task.max_prompt_tokens + c.rollout.max_tokens  # short prompts leave a part of it empty
    c.evaluation.every, c.evaluation.problems, c.evaluation.k = 2, 4, 4
    c.checkpoint.every = 2
    if c.reference.path:  # the policy before the first step is the teacher
        c.reference.path, c.reference.rule = None, "fixed"
    return c
