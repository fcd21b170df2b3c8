"""How fast, how large: the trainer itself on fixed work, with a model of random weights.

    python bench.py --size=1.7b --new_tokens=512      sizes: tiny, 0.6b, 1.7b, 4b, 8b (Qwen3's);
                                                      qwen3.5 of 0.75 B, and qwen3 of that size
    python bench.py --kl=True --rollout=False         with a KL penalty; the update alone
    python bench.py --bare=True                       rollouts beside vLLM alone, same prompts
    python bench.py --peer=trl                        the same work in TRL, if it is installed
    python bench.py --sweep=True --picture=sweep.png  responses of 256 to 8,192 tokens
    python bench.py --memory=True                     peak memory, 0.6b to 8b, with vLLM
    python bench.py --soak=500                        do memory and step time stay the same?

The work: --prompts=16 --group=8 --prompt_tokens=128 --new_tokens=256 --steps=5 --warmup=2; in a
sweep --lengths=256,1024,4096,8192 (tiny: 16 and 32 tokens; 32,128,512). --kl, --checkpointing,
--vllm and --sleep are short for use_kl_penalty, gradient_checkpointing, use_vllm and vllm_sleep;
all other settings of starter.py can be given, too.
Every step is one of starter.main(), with responses of exactly new_tokens tokens. --model_dir keeps
the model. The last line is one JSON object."""
import starter  # first: it answers --help before the slow imports
import functools, gc, importlib.util, json, os, random, statistics, subprocess, sys, tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import tiny
import torch
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

SIZES = {  # Qwen3: width, width of the MLP, layers, attention heads, is the output layer tied
    "0.6b": (1024, 3072, 28, 16, True), "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True), "8b": (4096, 12288, 36, 32, False)}
PAIR = ("qwen3.5", "qwen3")  # 0.75 B each: three of four layers have linear attention, or none
SHORT_NAMES = {"kl": "use_kl_penalty", "checkpointing": "gradient_checkpointing",
               "vllm": "use_vllm", "sleep": "vllm_sleep"}


def make_config(size):
    common = {"max_position_embeddings": 40960, "bos_token_id": None, "eos_token_id": 256,
              "pad_token_id": 257}
    if size == "qwen3.5":
        return Qwen3_5TextConfig(
            **common, vocab_size=248320, hidden_size=1024, intermediate_size=3584, head_dim=256,
            num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
            linear_num_key_heads=16, linear_num_value_heads=16, tie_word_embeddings=True)
    vocabulary = 248320 if size == "qwen3" else 151936
    width, mlp_width, layers, heads, is_tied = SIZES.get(size, (1024, 3072, 32, 16, True))
    return Qwen3Config(
        **common, vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp_width,
        head_dim=128, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
        rope_theta=1e6, tie_word_embeddings=is_tied)


def make_model_folder(size, folder):
    """A model of random weights with the byte tokenizer, for which a letter is a token."""
    if size == "tiny":
        model = tiny.make_model()
    else:
        torch.manual_seed(0)
        config = make_config(size)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with starter.written_whole(folder) as temporary:
        model.save_pretrained(temporary)
        tiny.make_tokenizer().save_pretrained(temporary)


def random_prompts(options):
    generator, n_steps = random.Random(0), (options.warmup + options.steps) * len(options.lengths)
    n = options.prompts * n_steps + 1
    return ["".join(generator.choices("abcdefghij", k=options.prompt_tokens)) for _ in range(n)]


class Bench:
    """The trainer with its parts timed."""

    def __init__(self, options):
        self.options, self.seconds = options, Counter()
        self.lengths = starter.repeat(options.lengths, options.warmup + options.steps)
        self.original = SimpleNamespace(**vars(starter))
        # What is not to be measured is replaced.
        starter.reward_fn, starter.evaluate_model = random_reward, no_evaluation
        starter.save_model = starter.save_checkpoint = starter.report = nothing
        if not options.rollout:
            starter.load_policy_into_vllm_instance = nothing
        # What is to be measured is wrapped.
        starter.init_vllm, starter.roll_out = self.init_vllm, self.roll_out
        starter.log_train = self.log_train
        for name, phase in {"score": "ref_log_probs", "update_weights": "optimizer"}.items():
            setattr(starter, name, functools.partial(self.timed, phase, getattr(starter, name)))

    def timed(self, phase, function, *args, **keywords):
        start = starter.now()
        result = function(*args, **keywords)
        self.seconds[phase] += starter.now() - start
        return result

    def init_vllm(self, policy, *args):
        self.policy, self.device = policy, policy.device.type
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        llm = self.original.init_vllm(policy, *args) if self.options.rollout else None
        self.engine = torch.cuda.memory_allocated() - before
        return llm

    def roll_out(self, llm, task, problems, params, *args):
        length = self.lengths.pop(0)
        params = params | {"max_tokens": length, "stop_token_ids": []}
        self.last_rollout = llm, [problem["prompt_ids"] for problem in problems], params
        if self.options.rollout:
            responses = self.original.roll_out(llm, task, problems, params, *args)
        else:
            shape = (len(problems) * params["n"], length)
            rows = torch.randint(0, self.policy.model.config.vocab_size, shape).tolist()
            responses = [starter.Response(row, problem={"turns": []}) for row in rows]
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the update begins
        return responses

    def log_train(self, log, step, metrics, cfg):
        """Comes after every step. What is added to the metrics is written to metrics.jsonl."""
        self.original.log_train(log, step, metrics, cfg)
        metrics["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        # Microbatches overlap, so they are not timed one by one.
        self.seconds["forward_backward"] = metrics["time/train"] - sum(self.seconds.values())
        if self.options.bare:
            # vLLM alone on the same prompts: a rollout should not take much longer.
            from vllm import SamplingParams
            llm, prompts, params = self.last_rollout
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            sampling = [SamplingParams(**params, seed=i) for i in range(len(prompts))]
            self.timed("bare_generate", llm.generate, inputs, sampling, use_tqdm=False)
        metrics |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()


def random_reward(text, problem):
    return random.random()


def no_evaluation(*args):
    return dict.fromkeys(("eval/accuracy", "eval/mean_reward"), 0.0), []


def nothing(*args):
    pass


def measure(options, flags, folder):
    """A short training run -> (a result for each response length, the trainer's settings)"""
    rate = matmul_rate()
    gc.collect()  # what is left of making the model must not count
    rows = [{"prompt": prompt, "answer": "1"} for prompt in random_prompts(options)]
    Path(folder, "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bench, longest = Bench(options), max(options.lengths)
    starter.main([
        f"--model_id={options.model_dir}", f"--task={folder}/task.jsonl",
        f"--out_dir={folder}/out", f"--n_grpo_steps={len(bench.lengths)}", "--n_eval=1",
        f"--rollout_batch_size={options.prompts * options.group}", f"--group_size={options.group}",
        f"--max_prompt_tokens={options.prompt_tokens}", f"--max_tokens={longest}",
        "--save_every=0", "--reward_truncated=True", *flags])
    run = Path(folder, "out", "latest")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    results = []
    for length in options.lengths:
        del steps[:options.warmup + (not results)]  # the first row is an evaluation
        results.append(summary(steps[:options.steps], length, rate, bench))
        del steps[:options.steps]
    print(f"medians: {json.dumps(results, indent=1)}")
    return results, json.loads((run / "config.json").read_text())


def summary(steps, length, rate, bench):
    """Medians over steps with responses of this length"""
    options = bench.options
    if not steps:
        raise starter.RunFailed(f"stopped before a step with {length} tokens was measured")
    n_response_tokens = options.prompts * options.group * length
    seconds = {name.removeprefix("time/"): statistics.median(step[name] for step in steps)
               for name in steps[-1] if name.startswith("time/") and name != "time/minutes"}
    rollouts = [step["time/rollout"] for step in steps]
    flops_per_s = flops(bench.policy.model, options, length) / seconds["forward_backward"]
    peak = max(step["peak_gib"] for step in steps)
    return {
        "new_tokens": round(steps[-1]["train/avg_output_tokens"]), "steps": len(steps),
        "seconds": seconds,
        "rollout_tokens_per_s": n_response_tokens / seconds["rollout"],
        "slowest_to_fastest_rollout": max(rollouts) / min(rollouts),
        "us_per_response_token": {name: seconds[name] / n_response_tokens * 1e6
                                  for name in ("step", "rollout", "forward_backward")},
        "matmul_tflops": rate / 1e12, "forward_backward_utilisation": flops_per_s / rate,
        "peak_gib": peak, "peak_without_engine_gib": peak - bench.engine / 2**30,
        **{name.removeprefix("rollout/"): max(step[name] for step in steps)
           for name in steps[-1] if name.startswith("rollout/")}}  # gap between sampler and trainer


def flops(model, options, length):
    """Forward + backward of what the trainer computes: 6 per weight and token, each prompt once;
    the head only where a response token is predicted; 12 per layer, width and pair of tokens."""
    config, head = model.config, model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.base_model.layers.parameters())
    n_prompt, n_response = options.prompt_tokens, options.group * length
    pairs = n_prompt**2 / 2 + n_response * (n_prompt + length / 2)
    products = body * (n_prompt + n_response) + head * n_response
    layer_types = getattr(config, "layer_types", ["full_attention"] * config.num_hidden_layers)
    n_attending = layer_types.count("full_attention")
    width = n_attending * config.num_attention_heads * config.head_dim
    return options.prompts * (6 * products + 12 * width * pairs)


def matmul_rate():
    """Operations per second of a large matrix product."""
    n, options = 1024, {"device": "cpu", "dtype": torch.float32}
    if torch.cuda.is_available():
        n, options = 8192, {"device": "cuda", "dtype": torch.bfloat16}
    matrices = dict(zip("ab", torch.randn(2, n, n, **options)))
    timer = Timer("a @ b", globals=matrices, num_threads=torch.get_num_threads())
    return 2 * n**3 / timer.timeit(10).mean


def measure_trl(options, given, folder):
    """The same work in TRL: its trainer, its vLLM in the same process, its defaults otherwise."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    is_cuda, stamps = torch.cuda.is_available(), []
    use_vllm = is_cuda and given["vllm"] == "True"  # on a CPU its sync into vLLM 0.32 fails
    always_long = {"ignore_eos": True} if use_vllm else {"min_new_tokens": options.new_tokens}
    class Clock(TrainerCallback):
        def on_step_end(self, *args, **keywords):
            stamps.append(starter.now())

    config = GRPOConfig(
        output_dir=f"{folder}/out", per_device_train_batch_size=options.trl_microbatch,
        gradient_accumulation_steps=options.prompts * options.group // options.trl_microbatch,
        num_generations=options.group, max_completion_length=options.new_tokens,
        beta=0.04 if given["kl"] == "True" else 0.0, max_steps=options.warmup + options.steps,
        gradient_checkpointing=given["checkpointing"] == "True", save_strategy="no", report_to=[],
        model_init_kwargs={"dtype": "bfloat16" if is_cuda else "float32"}, disable_tqdm=True,
        bf16=is_cuda, use_cpu=not is_cuda, generation_kwargs=always_long, use_vllm=use_vllm,
        vllm_mode="colocate", vllm_gpu_memory_utilization=float(given["gpu_mem_util"]),
        vllm_max_model_length=options.prompt_tokens + options.new_tokens + 8)
    table = InMemoryTable.from_pydict({"prompt": random_prompts(options)})
    trainer = GRPOTrainer(
        model=options.model_dir, args=config, callbacks=[Clock()],
        train_dataset=Dataset(table, fingerprint="bench"),  # so that it is not hashed
        reward_funcs=lambda completions, **_: [random.random() for _ in completions])
    trainer.train()
    return {"seconds": {"step": statistics.median(starter.np.diff(stamps[options.warmup - 1:]))},
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def again(*flags):
    """This program in a new process, so with all of the GPU -> what it prints last"""
    run = subprocess.run([sys.executable, *sys.argv, *flags], stdout=subprocess.PIPE, text=True)
    print(run.stdout, flush=True)
    if run.returncode:
        raise starter.RunFailed(f"the run with {' '.join(flags)} failed")
    return json.loads(run.stdout.splitlines()[-1])


def compare_with_trl(options):
    ours = again("--peer=", f"--model_dir={options.model_dir}")
    names = SHORT_NAMES | {"gpu_mem_util": "gpu_mem_util"}
    same = [f"--{short}={ours['trainer'][name]}" for short, name in names.items()]
    theirs = again("--peer=trl_alone", f"--model_dir={options.model_dir}", *same)
    return {"ours": ours["ours"], "trl": theirs,
            "ratio_to_trl": ours["ours"]["seconds"]["step"] / theirs["seconds"]["step"]}


def draw(results, path):
    from matplotlib.figure import Figure
    axes = Figure(figsize=(6, 3.2)).subplots()
    for name in ("step", "rollout", "forward_backward"):
        axes.plot([str(result["new_tokens"]) for result in results],
                  [result["us_per_response_token"][name] for result in results], "o-", label=name)
    axes.set(ylim=(0, None), xlabel="response length", ylabel="microseconds per response token")
    axes.legend()
    axes.figure.savefig(path, dpi=130, bbox_inches="tight")


def memory():
    """All weights and LoRA, with a KL penalty and with vLLM in 15 % of the GPU."""
    rows = []
    flags = "--memory=False --kl=True --compile=False --gpu_mem_util=0.15 --steps=1 --warmup=1"
    for case in [{"size": size, "lora_rank": rank} for size in SIZES for rank in (0, 32)]:
        words = [f"--{name}={value}" for name, value in case.items()]
        try:
            rows.append(case | again(*flags.split(), *words)["ours"])
        except starter.RunFailed as error:  # too large for this GPU
            rows.append(case | {"error": str(error)})
    return rows


def soak(n_steps, flags, folder):
    """A long run, watched: memory of this process, its open files, the time of a step."""
    rows, write = [], starter.Log.write

    def write_and_watch(log, step, metrics, *args):
        write(log, step, metrics, *args)
        n_pages = int(Path("/proc/self/statm").read_text().split()[1])
        rows.append((n_pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                     len(os.listdir("/proc/self/fd")), metrics.get("time/step", 0.0)))

    starter.Log.write = write_and_watch
    starter.main([f"--n_grpo_steps={n_steps}", f"--out_dir={folder}/out", *flags])
    fifth, result = len(rows) // 5, {"20-40 %": {}, "80-100 %": {}, "growth": {}}
    for name, values in zip(("memory_mib", "open_files", "step_seconds"), zip(*rows)):
        early = result["20-40 %"][name] = statistics.median(values[fifth:2 * fifth])
        late = result["80-100 %"][name] = statistics.median(values[-fifth:])
        result["growth"][name] = late / early - 1
    if result["growth"]["memory_mib"] > 0.05 or result["growth"]["open_files"] > 0:
        raise starter.RunFailed(f"not flat: {json.dumps(result)}")
    return result


def main():
    given, is_cuda = starter.read_arguments(sys.argv[1:]), torch.cuda.is_available()
    size = given.get("size", "1.7b" if is_cuda else "tiny")
    is_tiny = size == "tiny"
    options = SimpleNamespace(
        size=size, model_dir="", prompts=16, group=8, prompt_tokens=16 if is_tiny else 128,
        new_tokens=32 if is_tiny else 256, steps=5, warmup=2, rollout=True, bare=False, peer="",
        trl_microbatch=128 if is_tiny else 16, sweep=False, picture="", memory=False, soak=0,
        lengths="32,128,512" if is_tiny else "256,1024,4096,8192")
    starter.override(options, {name: given[name] for name in vars(options) if name in given})
    # All other names are the trainer's. On a CPU starting vLLM takes longer than the measurement.
    defaults = {"vllm": str(is_cuda or options.bare)}
    if options.soak:
        defaults = {"model_id": "tiny", "kl": "True"}
    settings = defaults | given
    flags = [f"--{SHORT_NAMES.get(name, name)}={value}" for name, value in settings.items()
             if name not in vars(options)]
    lengths = options.lengths.split(",") if options.sweep else [str(options.new_tokens)]
    sizes, peers = ["tiny", *SIZES, *PAIR], ["", "trl", "trl_alone"]
    rules = {f"size must be one of {sizes}": size in sizes,
             f"peer must be one of {peers}": options.peer in peers,
             "lengths must be numbers with commas": all(map(str.isdecimal, lengths)),
             "steps must be at least 1": options.steps > 0,
             "set steps, not n_grpo_steps": "n_grpo_steps" not in given,
             "set prompts, group and new_tokens, not rollout_batch_size, group_size and max_tokens":
                 options.soak or given.keys().isdisjoint(
                     ["rollout_batch_size", "group_size", "max_tokens"]),
             "soak must be at least 5": options.soak == 0 or options.soak >= 5,
             "memory needs a GPU": is_cuda or not options.memory,
             "TRL is not installed: pip install trl==1.16":
                 not options.peer or importlib.util.find_spec("trl"),
             "picture needs matplotlib, and a folder that exists":
                 not options.picture or (importlib.util.find_spec("matplotlib")
                                         and Path(options.picture).absolute().parent.is_dir())}
    for rule, is_kept in rules.items():
        if not is_kept:
            raise starter.UserError(rule)
    options.lengths = [int(length) for length in lengths]
    result = {"config": vars(options)}
    with tempfile.TemporaryDirectory() as folder:
        options.model_dir = options.model_dir or f"{folder}/model"
        if options.soak:
            result["soak"] = soak(options.soak, flags, folder)
        elif options.memory:
            result["memory"] = memory()
        elif options.peer == "trl":
            result |= compare_with_trl(options)
        elif options.peer == "trl_alone":
            result = measure_trl(options, given, folder)
        else:
            if not Path(options.model_dir).exists():
                make_model_folder(size, Path(options.model_dir))
            result["sweep"], result["trainer"] = measure(options, flags, folder)
            result["ours"] = result["sweep"][0]
            if options.picture:
                draw(result["sweep"], options.picture)
    print(json.dumps(result))


if __name__ == "__main__":
    starter.run(main)
