"""How fast, how large: the trainer's own functions on fixed work, with a synthetic model of random weights.

    python bench.py                                   on a GPU Qwen3-1.7B's shape; on a CPU the tiny model
    python bench.py --size=0.6b --new_tokens=512      sizes: tiny, 0.6b, 1.7b, 4b, 8b
    python bench.py --kl=True --checkpointing=False   with a KL penalty; without gradient checkpointing
    python bench.py --peer=trl                        the same work in TRL's GRPOTrainer (if installed), and the ratio
    python bench.py --sweep=True --picture=sweep.png  response lengths and batch sizes, one after the other
    python bench.py --memory=True                     peak memory of an update, 0.6b to 8b, all weights and LoRA
    python bench.py --soak=500                        so many steps of the tiny model with KL: do memory, open files
                                                      and step time stay as they are? (make soak)
    python bench.py --bare=True                       rollouts beside vLLM alone on the same prompts

Each step is one rollout batch, one update, one sync. The last line printed is one JSON object."""
import gc, json, math, os, random, statistics, subprocess, sys, tempfile, time
from types import SimpleNamespace

import starter as s
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

SIZES = {   # the shapes of the Qwen3 family
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8),
    "1.7b": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8),
    "4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8),
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, tie_word_embeddings=False),
}


def make_model(size, device):
    if size == "tiny":
        return s.init_policy("tiny", device)[0]
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=151936, head_dim=128, max_position_embeddings=40960, rope_theta=1e6,
                         **{"tie_word_embeddings": True} | SIZES[size])
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="packed").train()
        torch.set_default_dtype(torch.float32)
    return model


class Phases:
    """Seconds spent in the trainer's functions, by wrapping them."""

    def __init__(self, cuda):
        self.cuda, self.seconds = cuda, {}

    def clock(self):
        if self.cuda: torch.cuda.synchronize()
        return time.perf_counter()

    def wrap(self, owner, name, phase):
        inner = getattr(owner, name)

        def timed(*args, **kw):
            start = self.clock()
            try: return inner(*args, **kw)
            finally: self.seconds[phase] = self.seconds.get(phase, 0.0) + self.clock() - start
        setattr(owner, name, timed)


def flops(model, prompts, group, prompt_tokens, new_tokens):
    """Forward + backward of what the trainer computes: 6 per weight and token, each prompt once; the head only where a
    response token is predicted; causal attention, 12 per layer, width and pair of tokens."""
    c, head = model.config, model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.base_model.layers.parameters())
    tokens, responses = prompts * prompt_tokens, prompts * group * new_tokens
    pairs = tokens * prompt_tokens / 2 + responses * (prompt_tokens + new_tokens / 2)
    return (6 * body * (tokens + responses) + 6 * head * responses
            + 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * pairs)


def matmul_rate(cuda):
    n = 8192 if cuda else 1024
    a, b = (torch.randn(n, n, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32)
            for _ in range(2))
    for _ in range(3): a @ b
    if cuda: torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10): a @ b
    if cuda: torch.cuda.synchronize()
    return 2 * n**3 * 10 / (time.perf_counter() - start)


def build(o, longest=0):
    """Policy, reference, sampler, optimizer: what the steps of `measure` work with."""
    cuda, m = o.device == "cuda", SimpleNamespace()
    m.policy = make_model(o.size, o.device)
    m.rate = matmul_rate(cuda)
    if o.lora_rank: s.add_lora(m.policy, o.lora_rank, 0)
    if o.checkpointing: m.policy.gradient_checkpointing_enable({"use_reentrant": False})
    m.ref = None
    if o.kl: m.ref = m.policy if o.lora_rank else s.copy.deepcopy(m.policy).eval().requires_grad_(False)
    if o.compile: [s.compile_layers(x) for x in {m.policy, m.ref} - {None}]
    m.weights = torch.cuda.memory_allocated() if cuda else 0
    start = time.perf_counter()
    m.llm = s.TorchSampler(m.policy) if not o.vllm else s.init_vllm(
        m.policy, o.prompt_tokens + max(o.new_tokens, longest), o.prompts * o.group, o.gpu_mem_util, o.eager, o.sleep)
    print(f"sampler started in {time.perf_counter() - start:.0f} s", flush=True)
    m.engine = torch.cuda.memory_allocated() - m.weights if cuda else 0
    m.optimizer = s.Optimizer(m.policy, 1e-6)
    m.phases = Phases(cuda)
    m.phases.wrap(s, "score", "ref_log_probs")
    m.phases.wrap(s, "grpo_microbatch_step", "forward_backward")
    m.phases.wrap(m.optimizer, "step", "optimizer")
    return m


def random_responses(o, vocab, g):
    """In place of a rollout, where only the update is measured."""
    ids = torch.randint(0, vocab, (o.prompts * o.group, o.new_tokens), generator=g).tolist()
    return [(r, [math.nan] * len(r), True) for r in ids]


def measure(o, m):
    cuda, policy, phases = o.device == "cuda", m.policy, m.phases
    cfg = SimpleNamespace(loss_type="grpo", max_tokens=o.new_tokens, temperature=1.0, clip_range=0.2,
                          clip_range_high=0.0, mismatch_cap=2.0, kl_estimator=o.kl_estimator, kl_importance_weight=True,
                          kl_in="loss", ref_offload=False, inner_epochs=1, n_minibatches=1,
                          gradient_accumulation_steps=1, tokens_per_microbatch=o.tokens_per_microbatch, seed=0,
                          max_grad_norm=1.0, max_kl=1e9, warmup_steps=0, max_consecutive_skips=1)
    state = SimpleNamespace(lr_scale=1.0, skipped=0, consecutive_skips=0)
    params = s.init_sampling_params(1.0, 0, o.new_tokens, o.group, []) | ({"ignore_eos": True} if o.vllm else {})
    g = torch.Generator().manual_seed(0)
    vocab = policy.config.vocab_size
    rows, peak = [], 0
    for step in range(1, o.warmup + o.steps + 1):
        prompts = torch.randint(0, min(vocab, 256), (o.prompts, o.prompt_tokens), generator=g).tolist()
        phases.seconds = {}
        t0 = phases.clock()
        responses = (s.rollout_with_vllm(m.llm, prompts, params, 0, step) if o.rollout
                     else random_responses(o, vocab, g))
        t1 = phases.clock()
        if o.sleep: m.llm.sleep(level=2)
        batch = s.make_batch([p for p in prompts for _ in range(o.group)], [r[0] for r in responses],
                             [r[1] for r in responses], o.device)
        advantages = torch.randn(len(responses), generator=g).to(o.device)
        if cuda: torch.cuda.reset_peak_memory_stats()
        t2 = phases.clock()
        s.update_policy(policy, m.optimizer, batch, advantages, cfg, step, state, m.ref, 0.04 if o.kl else 0.0)
        t3 = phases.clock()
        if cuda: peak = max(peak, torch.cuda.max_memory_allocated())
        if o.sleep: m.llm.wake_up(tags=["weights"])
        s.load_policy_into_vllm_instance(policy, m.llm)
        if o.sleep: m.llm.wake_up(tags=["kv_cache"])
        t4 = phases.clock()
        row = {"step": t4 - t0, "rollout": t1 - t0, **phases.seconds, "update": t3 - t2, "sync": t4 - t3}
        if o.bare and o.vllm: row["bare_generate"] = bare_generate(m.llm, prompts, params, phases)
        print(f"{'warm-up' if step <= o.warmup else 'step'} {step}: "
              + ", ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
        if step > o.warmup: rows.append(row)
    median = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    tokens = o.prompts * o.group * (o.prompt_tokens + o.new_tokens)
    work = flops(policy, o.prompts, o.group, o.prompt_tokens, o.new_tokens)
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    fixed = 16 * trained if cuda else 0                   # float32 masters, gradients, 2 moments
    return {"seconds": median, "tokens_per_s": tokens / median["step"], "matmul_tflops": m.rate / 1e12,
            "us_per_response_token": {k: median[k] / (o.prompts * o.group * o.new_tokens) * 1e6
                                      for k in ("step", "rollout", "forward_backward")},
            "forward_backward_utilisation": work / median["forward_backward"] / m.rate,
            "peak_training_gib": peak / 2**30, "peak_above_engine_gib": (peak - m.engine) / 2**30,
            "peak_above_engine_weights_optimizer_gib": (peak - m.engine - fixed - m.weights) / 2**30}


def bare_generate(llm, prompts, params, phases):
    """vLLM alone on the same prompts: what rollout_with_vllm may not be much slower than."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    llm.reset_prefix_cache()
    start = phases.clock()
    llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts],
                 [SamplingParams(**params, seed=i) for i in range(len(prompts))], use_tqdm=False)
    return phases.clock() - start


def trl(o):
    """The same work in TRL: its trainer, its vLLM colocation, its defaults otherwise."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    folder = tempfile.mkdtemp()
    model = make_model(o.size, o.device)
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(folder)
    s.Tokenizer().save(folder)              # bytes: one token per letter, so that prompt lengths are exact
    del model
    gc.collect()
    vllm = o.vllm and o.device == "cuda"     # on a CPU its sync into vLLM 0.32 fails (no attribute weight_loader)
    stamps = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kw):
            if o.device == "cuda": torch.cuda.synchronize()
            stamps.append(time.perf_counter())
    rng = random.Random(0)
    prompts = ["".join(rng.choice("abcdefghij") for _ in range(o.prompt_tokens))
               for _ in range(o.prompts * (o.warmup + o.steps + 1))]
    data = Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="bench")      # named: nothing to hash
    config = GRPOConfig(
        output_dir=folder + "/out", per_device_train_batch_size=o.trl_microbatch,
        gradient_accumulation_steps=o.prompts * o.group // o.trl_microbatch, num_generations=o.group,
        max_completion_length=o.new_tokens, beta=0.04 if o.kl else 0.0, learning_rate=1e-6,
        max_steps=o.warmup + o.steps, bf16=o.device == "cuda", gradient_checkpointing=o.checkpointing, use_vllm=vllm,
        logging_steps=1, save_strategy="no", report_to=[],
        model_init_kwargs={"dtype": "bfloat16" if o.device == "cuda" else "float32"}, use_cpu=o.device != "cuda",
        disable_tqdm=True, generation_kwargs={"ignore_eos": True} if vllm else {"min_new_tokens": o.new_tokens},
        **(dict(vllm_mode="colocate", vllm_gpu_memory_utilization=o.gpu_mem_util,
                vllm_max_model_length=o.prompt_tokens + o.new_tokens + 8) if vllm else {}))
    trainer = GRPOTrainer(model=folder, reward_funcs=lambda completions, **kw: [rng.random() for _ in completions],
                          args=config, train_dataset=data, callbacks=[Clock()])
    if o.device == "cuda": torch.cuda.reset_peak_memory_stats()
    trainer.train()
    steps = [b - a for a, b in zip(stamps[o.warmup - 1:], stamps[o.warmup:])]
    return {"seconds": {"step": statistics.median(steps)},
            "peak_training_gib": torch.cuda.max_memory_allocated() / 2**30 if o.device == "cuda" else 0.0}


def sweep(o):
    """Response lengths with the same number of responses, then more responses of the shortest; one engine for all."""
    lengths = (16, 32, 64, 128) if o.size == "tiny" else (256, 1024, 4096, 8192)
    m, rows = build(SimpleNamespace(**vars(o) | {"prompts": 4 * o.prompts}), max(lengths)), []
    for n, prompts in [(n, o.prompts) for n in lengths] + [(lengths[0], 2 * o.prompts), (lengths[0], 4 * o.prompts)]:
        part = SimpleNamespace(**vars(o) | {"new_tokens": n, "prompts": prompts})
        if n > 2000: part.steps, part.warmup = 1, 0       # compiled and warm by then
        print(f"--- {prompts} prompts x {o.group} responses of {n} tokens", flush=True)
        rows.append({"new_tokens": n, "prompts": prompts} | measure(part, m))
        print(json.dumps(rows[-1]), flush=True)           # each at once: nothing is lost if the next is too long
    return rows


def picture(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(6, 3.2))
    rows = [r for r in rows if r["prompts"] == rows[0]["prompts"]]
    lengths = [r["new_tokens"] for r in rows]
    for name in ("step", "rollout", "forward_backward"):
        ax.plot(lengths, [r["us_per_response_token"][name] for r in rows], "o-", label=name)
    ax.set(xscale="log", xlabel="tokens per response", ylabel="microseconds per response token", ylim=(0, None))
    ax.set_xticks(lengths, lengths), ax.minorticks_off()
    ax.legend(), fig.tight_layout(), fig.savefig(path, dpi=130)


def memory(o):
    """Peak of the update alone, for each size, all weights and LoRA, with gradient checkpointing: what to add vLLM's
    share to. Each in a process of its own."""
    rows = []
    for size in ("0.6b", "1.7b", "4b", "8b"):
        for rank in (0, 32):
            part = again([f"--size={size}", f"--lora_rank={rank}", "--memory=False", "--vllm=False", "--rollout=False",
                          "--compile=False", "--steps=1", "--warmup=1", "--kl=True"], check=False)
            rows.append({"size": size, "lora_rank": rank, "peak_gib": part and part["ours"]["peak_training_gib"]})
            print(rows[-1], flush=True)
    return rows


def soak(steps):
    """A long training run, watched: this process's memory, its open files, the time of a step."""
    rows, memory, write = [], [], s.Log.write

    def watched(log, step, metrics):
        write(log, step, metrics)
        pages = int(open("/proc/self/statm").read().split()[1])
        if step: rows.append((len(os.listdir("/proc/self/fd")), metrics["time/step"]))
        if step and "eval/accuracy" in metrics: memory.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    s.Log.write = watched
    with tempfile.TemporaryDirectory() as folder:
        s.main(["--model_id=tiny", "--use_kl_penalty=True", f"--n_grpo_steps={steps}", f"--out_dir={folder}/out"])
    median = lambda x, a, b: statistics.median(x[int(a * len(x)):int(b * len(x))])
    files, seconds = zip(*rows)
    names = {"memory_mib": memory, "open_files": files, "step_seconds": seconds}      # memory: after each evaluation
    early, late = ({k: median(x, *part) for k, x in names.items()} for part in ((0.2, 0.4), (0.8, 1.0)))
    result = {"steps": steps, "20-40 %": early, "80-100 %": late, "growth": {k: late[k] / early[k] - 1 for k in names}}
    if late["memory_mib"] > 1.05 * early["memory_mib"] or late["open_files"] > early["open_files"]:
        raise s.UserError(f"not flat: {json.dumps(result)}")
    return result


def main():
    cuda = torch.cuda.is_available()
    given = s.parse_arguments(sys.argv[1:])
    size = given.get("size", "1.7b" if cuda else "tiny")
    tiny = size == "tiny"
    o = SimpleNamespace(size=size, device="cuda" if cuda else "cpu", prompts=16, group=8,
                        prompt_tokens=16 if tiny else 128, new_tokens=32 if tiny else 256, steps=5, warmup=2, kl=False,
                        kl_estimator="k3", checkpointing=not tiny, compile=cuda and not tiny, lora_rank=0, vllm=cuda,
                        rollout=True, bare=False, eager=False, sleep=False, gpu_mem_util=0.3,
                        tokens_per_microbatch=20480, peer="", trl_microbatch=128 if tiny else 16, sweep=False,
                        memory=False, picture="", soak=0, only="")
    s.override(o, given)
    if size != "tiny" and size not in SIZES:
        raise s.UserError(f"size must be tiny or one of {', '.join(SIZES)}, got {size!r}")
    if o.peer not in ("", "trl"): raise s.UserError(f"peer must be trl, got {o.peer!r}")
    if o.only == "trl":
        print(json.dumps(trl(o)))
        return
    result = {"config": vars(o)}
    if o.soak: result["soak"] = soak(o.soak)
    elif o.memory: result["memory"] = memory(o)
    elif o.sweep:
        result["sweep"] = sweep(o)
        if o.picture: picture(result["sweep"], o.picture)
    elif o.peer:                                          # each in a process, and so with a GPU, of its own
        result["ours"], result["trl"] = again(["--peer="])["ours"], again(["--only=trl", "--peer="])
        result["ratio_to_trl"] = result["ours"]["seconds"]["step"] / result["trl"]["seconds"]["step"]
        print(f"ours {result['ours']['seconds']['step']:.3f} s per step, TRL {result['trl']['seconds']['step']:.3f} s: "
              f"ratio {result['ratio_to_trl']:.2f}")
    else: result["ours"] = measure(o, build(o))
    print(json.dumps(result))


def again(extra, check=True):
    """This program in a fresh process, so that nothing is left in the GPU's memory; its last line."""
    run = subprocess.run([sys.executable, __file__, *sys.argv[1:], *extra], stdout=subprocess.PIPE, text=True)
    if run.returncode and not check: return None
    if run.returncode: raise s.UserError(f"the run with {' '.join(extra)} failed")
    print(run.stdout)
    return json.loads(run.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    try: main()
    except s.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
