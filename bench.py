"""Measure speed and memory of the trainer on fixed work, with a model of random weights.

    python bench.py --size=1.7b --new_tokens=512    sizes: tiny, 0.6b, 1.7b, 4b, 8b (as in Qwen3)
    python bench.py --rollout=False                 the update alone, on random responses
    python bench.py --gpu_gib=24                    as on a GPU with 24 GiB of memory
    python bench.py --peer=trl                      compare with TRL, if it is installed

The work: --prompts=16 --group=8 --prompt_tokens=128 --new_tokens=256 --steps=5 --warmup=2 (tiny: 16
and 32 tokens). Every response has exactly new_tokens tokens. --model_dir=FOLDER keeps the model.
Hyperparameters of starter.py can be given, too, such as --use_kl_penalty.

The last line is one JSON object. seconds: medians; train is forward_backward + optimizer +
ref_log_probs (old ones, too). peak_gib: most memory that torch allocated in an update. gap: largest
mean difference of log-probs between sampler and trainer."""
import starter  # first: it answers --help before the slow imports
import functools, gc, importlib.util, json, math, random, statistics, subprocess, sys, tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

SIZES = {  # width, width of the MLP, layers, attention heads, is the output layer tied
    "0.6b": (1024, 3072, 28, 16, True), "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True), "8b": (4096, 12288, 36, 32, False)}
REPORTED = ("offload", "vllm_sleep", "tokens_per_microbatch", "gpu_mem_util", "use_vllm",
            "use_kl_penalty", "gradient_checkpointing", "compile", "lora_rank")
GIB = 2**30
ORIGINAL = SimpleNamespace(**vars(starter))  # Bench replaces some of its functions
tiny = starter.load_task_file("tiny")


def main():
    given = starter.read_arguments(sys.argv[1:])
    has_gpu = torch.cuda.is_available()
    size = given.get("size", "1.7b" if has_gpu else "tiny")
    is_tiny = size == "tiny"
    options = SimpleNamespace(
        size=size, model_dir="", prompts=16, group=8, prompt_tokens=16 if is_tiny else 128,
        new_tokens=32 if is_tiny else 256, steps=5, warmup=2, rollout=True, gpu_gib=0.0, peer="",
        trl_microbatch=128 if is_tiny else 16)
    own = {name: given.pop(name) for name in vars(options) if name in given}
    starter.override(options, own)
    with tempfile.TemporaryDirectory() as folder:
        options.model_dir = str(Path(options.model_dir or f"{folder}/model").absolute())
        work = {
            "model_id": options.model_dir, "task": folder,
            "out_dir": f"{folder}/out", "n_grpo_steps": options.warmup + options.steps,
            "eval_every": 0, "n_eval": 1, "save_every": 0, "reward_truncated": True,
            "rollout_batch_size": options.prompts * options.group, "group_size": options.group,
            "max_prompt_tokens": options.prompt_tokens, "max_tokens": options.new_tokens}
        check_options(options, [name for name in work if name in given], has_gpu)
        # On a CPU, the start of vLLM takes longer than the measurement.
        settings = {"use_vllm": has_gpu} | given | work
        argv = [f"--{name}={value}" for name, value in settings.items()]
        cfg = starter.main(argv, only_settings=True)  # finds bad settings
        if not Path(options.model_dir).exists():
            make_model_folder(size, Path(options.model_dir))
        if options.peer == "trl":
            result = compare_with_trl(options)
        elif options.peer == "trl_alone":
            result = measure_trl(options, cfg)
        else:
            result = measure(options, cfg, argv)
    print(json.dumps(result | {"options": vars(options)}))


def check_options(options, fixed, has_gpu):
    rules = {
        f"size must be one of tiny, {', '.join(SIZES)}": options.size in ("tiny", *SIZES),
        "steps and warmup must be at least 1": min(options.steps, options.warmup) > 0,
        f"{', '.join(fixed)}: set prompts, group, prompt_tokens, new_tokens or steps": not fixed,
        "gpu_gib needs a GPU, and no peer": not options.gpu_gib or (has_gpu and not options.peer),
        "peer must be trl (pip install trl==1.16)": not options.peer or (
            options.peer in ("trl", "trl_alone") and importlib.util.find_spec("trl"))}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise starter.UserError(rule)


def make_model_folder(size, folder):
    """Random weights, and the byte tokenizer: a letter is a token."""
    if size == "tiny":
        model = tiny.make_model()
    else:
        width, mlp_width, n_layers, n_heads, is_tied = SIZES[size]
        config = Qwen3Config(
            vocab_size=151936, hidden_size=width, intermediate_size=mlp_width, head_dim=128,
            num_hidden_layers=n_layers, num_attention_heads=n_heads, num_key_value_heads=8,
            rope_theta=1e6, tie_word_embeddings=is_tied, max_position_embeddings=40960,
            bos_token_id=None, eos_token_id=256, pad_token_id=257)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with starter.atomic_write(folder) as temporary:
        model.save_pretrained(temporary)
        tiny.make_tokenizer().save_pretrained(temporary)


HOLD = """import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()"""


def hold_memory(gib):
    """Start a process that leaves gib - 0.5 GiB free (0.5: driver and CUDA context). It ends when
    its input is closed, so also if this process is killed."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(int((gib - 0.5) * GIB))],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    if not child.stdout.readline():
        raise starter.UserError("gpu_gib must be below the memory that is free")
    return child


def random_prompts(options):
    rng = random.Random(0)
    n = options.prompts * (options.warmup + options.steps) + 1  # one is held out
    return ["".join(rng.choices("abcdefghij", k=options.prompt_tokens)) for _ in range(n)]


def measure(options, cfg, argv):
    lines = [json.dumps({"prompt": prompt}) for prompt in random_prompts(options)]
    Path(cfg.task, "test.jsonl").write_text(lines[0])
    Path(cfg.task, "train.jsonl").write_text("\n".join(lines[1:]))
    gc.collect()  # what is left of making the model
    torch.cuda.empty_cache()
    if options.gpu_gib:
        total = torch.cuda.mem_get_info()[1]  # also makes the context of this process
        child = hold_memory(options.gpu_gib)  # for as long as there is this name
        argv = [*argv, f"--gpu_mem_util={cfg.gpu_mem_util * options.gpu_gib * GIB / total}"]
    bench = Bench(options)
    starter.main(argv)
    return bench.result()


class Bench:
    """Methods that take the place of functions of the trainer, and what they measure"""

    def __init__(self, options):
        self.options = options
        self.steps = []  # seconds per phase, of every step
        self.peak = self.gap = 0.0
        starter.reward_fn = self.random_reward
        starter.save_model = starter.Checkpoint.save = self.nothing
        if not options.rollout:
            starter.load_policy_into_vllm_instance = starter.check_agreement = self.nothing
        starter.init_vllm = self.init_vllm
        starter.generate = self.generate
        starter.score = functools.partial(self.timed, "ref_log_probs", ORIGINAL.score)
        starter.update_weights = functools.partial(self.timed, "optimizer", ORIGINAL.update_weights)
        starter.log_train = self.log_train

    def random_reward(self, text, problem):
        return random.random()

    def nothing(self, *args):
        pass

    def init_vllm(self, policy, tokenizer, cfg, turn_ends=()):
        self.cfg = cfg
        self.log_prob = -math.log(policy.model.config.vocab_size)  # as if sampled
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        llm = ORIGINAL.init_vllm(policy, tokenizer, cfg) if self.options.rollout else None
        cfg.vllm_sleep = cfg.vllm_sleep and self.options.rollout
        self.engine = torch.cuda.memory_allocated() - before
        return llm

    def generate(self, llm, task, responses):
        self.seconds = {"generate": 0.0, "ref_log_probs": 0.0, "optimizer": 0.0}  # a step begins
        task.stop_ids = []  # no response ends before max_tokens
        if self.options.rollout:
            parts = self.timed("generate", ORIGINAL.generate, llm, task, responses)
        else:
            shape = (len(responses), self.options.new_tokens)
            rows = torch.randint(0, len(task.tokenizer), shape).tolist()
            parts = [(row, [self.log_prob] * len(row)) for row in rows]
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # the update begins
        return parts

    def timed(self, phase, function, *args):
        started = starter.synced_time()
        result = function(*args)
        self.seconds[phase] += starter.synced_time() - started
        return result

    def log_train(self, step, metrics, cfg):
        """Ends a step."""
        ORIGINAL.log_train(step, metrics, cfg)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        self.gap = max(self.gap, metrics["rollout/logp_gap_mean"])
        # Microbatches overlap, so they are not timed one by one.
        others = self.seconds["ref_log_probs"] + self.seconds["optimizer"]
        self.seconds["forward_backward"] = metrics["time/train"] - others
        for phase in ("step", "rollout", "train", "sync"):
            self.seconds[phase] = metrics[f"time/{phase}"]
        self.steps.append(self.seconds)

    def result(self):
        steps = self.steps[self.options.warmup:]
        seconds = {phase: statistics.median(step[phase] for step in steps) for phase in steps[0]}
        return {"n_steps": len(steps), "seconds": seconds, "peak_gib": self.peak / GIB,
                "peak_without_engine_gib": (self.peak - self.engine) / GIB,
                "gap": self.gap if self.options.rollout else None,
                **{name: getattr(self.cfg, name) for name in REPORTED}}


def compare_with_trl(options):
    ours = again("--peer=", f"--model_dir={options.model_dir}")
    names = ("use_vllm", "use_kl_penalty", "gradient_checkpointing", "gpu_mem_util")
    same = [f"--{name}={ours[name]}" for name in names]
    theirs = again("--peer=trl_alone", f"--model_dir={options.model_dir}", *same)
    return {"ours": ours, "trl": theirs,
            "ratio_to_trl": ours["seconds"]["step"] / theirs["seconds"]["step"]}


def again(*flags):
    """This program in a new process, so with all of the GPU -> its result"""
    output = subprocess.check_output([sys.executable, *sys.argv, *flags], text=True)
    print(output)
    return json.loads(output.splitlines()[-1])


def measure_trl(options, cfg):
    """The same work in TRL, with vLLM in the same process and TRL's defaults otherwise"""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    has_gpu = torch.cuda.is_available()
    use_vllm = has_gpu and cfg.use_vllm  # on a CPU its sync into vLLM 0.32 fails
    always_long = {"ignore_eos": True} if use_vllm else {"min_new_tokens": options.new_tokens}
    config = GRPOConfig(
        output_dir=cfg.out_dir, per_device_train_batch_size=options.trl_microbatch,
        gradient_accumulation_steps=cfg.rollout_batch_size // options.trl_microbatch,
        num_generations=options.group, max_completion_length=options.new_tokens,
        beta=0.04 if cfg.use_kl_penalty else 0.0, max_steps=options.warmup + options.steps,
        gradient_checkpointing=cfg.gradient_checkpointing, save_strategy="no", report_to=[],
        model_init_kwargs={"dtype": "bfloat16" if has_gpu else "float32"}, disable_tqdm=True,
        bf16=has_gpu, use_cpu=not has_gpu, generation_kwargs=always_long, use_vllm=use_vllm,
        vllm_mode="colocate", vllm_gpu_memory_utilization=cfg.gpu_mem_util,
        vllm_max_model_length=options.prompt_tokens + options.new_tokens + 8)
    stamps = []
    class Clock(TrainerCallback):
        def on_step_end(self, *args, **keywords):
            stamps.append(starter.synced_time())

    table = datasets.table.InMemoryTable.from_pydict({"prompt": random_prompts(options)})
    trainer = GRPOTrainer(
        model=options.model_dir, args=config, callbacks=[Clock()],
        train_dataset=datasets.Dataset(table, fingerprint="bench"),  # so that it is not hashed
        reward_funcs=lambda completions, **_: [random.random() for _ in completions])
    trainer.train()
    seconds = statistics.median(starter.np.diff(stamps[options.warmup - 1:]))
    return {"seconds": {"step": seconds}, "peak_gib": torch.cuda.max_memory_allocated() / GIB}


if __name__ == "__main__":
    starter.run(main)
