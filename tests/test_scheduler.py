"""rollout_scheduler.py must change nothing but the speed: random cases without a model, and real
models in the real vLLM, with vLLM's own scheduler and with this one. Needs vLLM, but no GPU."""
import importlib.util, itertools, json, os, random, re, subprocess, sys, zlib
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))
# Read when vLLM is imported
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1"}

import numpy as np
import pytest
import torch

BLOCK = 16  # tokens in a block of the cache
LENGTH = 256  # tokens of a prompt and its response at most
# {model: blocks of the cache, so few that requests are preempted}. Gemma 3 has sliding windows.
FAMILIES = {"llama": 14, "gemma3": 24}
has_vllm = importlib.util.find_spec("vllm")
pytestmark = [pytest.mark.xdist_group("vllm"),
              pytest.mark.skipif(not has_vllm, reason="needs vLLM")]


# Without a model. vLLM is imported where it is used, because that takes seconds.

class StandIn:
    """In the place of vLLM's model runner. A token depends on everything its request finds in the
    cache, so a block that is missing, overwritten or another request's changes it."""

    def __init__(self, case):
        self.cache = np.zeros((case.n_blocks, BLOCK), np.int64)
        self.vocabulary = case.vocabulary
        self.windows = case.windows
        self.requests = {}

    def step(self, scheduled):
        for name in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self.requests.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                ids=list(new.prefill_token_ids), n_prompt=len(new.prompt_token_ids),
                n_computed=new.num_computed_tokens, seed=new.sampling_params.seed,
                blocks=[list(blocks) for blocks in new.block_ids])
        old = scheduled.scheduled_cached_reqs
        for row, name in enumerate(old.req_ids):
            request = self.requests[name]
            assert request.n_computed == old.num_computed_tokens[row]
            assert len(request.ids) - request.n_prompt == max(0, old.num_output_tokens[row])
            for blocks, new_blocks in zip(request.blocks, old.new_block_ids[row] or []):
                blocks += new_blocks
        for name, n_tokens in scheduled.num_scheduled_tokens.items():
            self.write(self.requests[name], n_tokens)
        return self.output(list(scheduled.num_scheduled_tokens))

    def write(self, request, n_tokens):
        for position in range(request.n_computed, request.n_computed + n_tokens):
            for blocks in request.blocks:
                block = blocks[position // BLOCK]
                self.cache[block, position % BLOCK] = LENGTH * request.ids[position] + position
        request.n_computed += n_tokens

    def sample(self, request):
        """-> a number made of what each group of layers sees"""
        number = request.seed
        for window, blocks in zip(self.windows, request.blocks):
            seen = self.cache[blocks].ravel()[:request.n_computed][-window:]
            number = zlib.crc32(seen.tobytes(), number)
        return number

    def output(self, names):
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
        new_ids, top_ids, log_probs = [], [], []
        for name in names:
            request = self.requests[name]
            number = self.sample(request)
            token = number % self.vocabulary
            is_sampled = request.n_computed == len(request.ids)  # else more of the prompt follows
            new_ids.append([token] if is_sampled else [])
            request.ids += new_ids[-1]
            top_ids.append([token, 5, 6])
            log_probs.append([-(number % 1000) / 64, -1, -2])
        lists = LogprobsLists(np.array(top_ids), np.array(log_probs, np.float32),
                              np.arange(len(names)))
        rows = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(names, rows, new_ids, lists if names else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's config for vLLM"""
    folder = tmp_path_factory.mktemp("model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000,
              "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 1, "max_position_embeddings": LENGTH}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_scheduler(cls, folder, case):
    """-> scheduler, and what makes the hashes of a request's blocks"""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec,
                                            SlidingWindowSpec)
    from vllm.v1.structured_output import StructuredOutputManager
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=LENGTH)
    plan = SchedulerConfig(max_num_seqs=case.n_at_once, max_num_batched_tokens=case.budget,
                           max_model_len=LENGTH, is_encoder_decoder=False, async_scheduling=True)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=case.caching)
    cache.num_gpu_blocks = case.n_blocks
    config = VllmConfig(model_config=model, scheduler_config=plan, cache_config=cache,
                        device_config=DeviceConfig("cpu"))
    groups = []
    for window in case.windows:
        sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
        layers = FullAttentionSpec(**sizes)
        if window < LENGTH:
            layers = SlidingWindowSpec(**sizes, sliding_window=window)
        groups.append(KVCacheGroupSpec([str(window)], layers))
    scheduler = cls(config, KVCacheConfig(case.n_blocks, [], groups),
                    StructuredOutputManager(config), block_size=BLOCK)
    scheduler.use_v2_model_runner = True  # as on a GPU
    if not case.caching:
        return scheduler, None
    function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(function)
    return scheduler, get_request_block_hasher(BLOCK, function)


class Engine:
    """vLLM's scheduler and output processor, in the order of its own engine, and the stand-in"""

    def __init__(self, folder, case, is_ours=True):
        from rollout_scheduler import RolloutScheduler
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.engine.output_processor import OutputProcessor
        cls = RolloutScheduler if is_ours else AsyncScheduler
        self.scheduler, self.hasher = make_scheduler(cls, folder, case)
        self.processor = OutputProcessor(None, log_stats=False)
        self.model = StandIn(case)
        self.in_flight = deque()
        self.n_steps = 0
        self.parts = []  # of each step: the names of the responses that got tokens
        self.outputs = {}

    def add(self, request):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True,
                                stop_token_ids=[0, 1], **request.params)
        core_request = EngineCoreRequest(request.name, request.prompt, None, params, None, 0.0,
                                         None, None, None, external_req_id=request.name)
        self.processor.add_request(core_request, None)
        self.scheduler.add_request(Request.from_engine_core_request(core_request, self.hasher))

    def abort(self, request):
        from vllm.v1.request import RequestStatus
        self.processor.abort_requests([request.name], internal=True)
        self.scheduler.finish_requests(request.name, RequestStatus.FINISHED_ABORTED)

    def n_parts(self):
        """-> {name of a response: in how many parts it came}"""
        return Counter(itertools.chain.from_iterable(self.parts))

    def is_busy(self):
        return (self.processor.has_unfinished_requests() or self.scheduler.has_requests()
                or self.in_flight)

    def step(self):
        """Schedule a step while the last one is in flight, then process that one."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.in_flight.append((scheduled, self.model.step(scheduled)))
            self.n_steps += 1
            if len(self.in_flight) < 2 and self.scheduler.has_requests():
                return
        if self.in_flight:
            results = self.scheduler.update_from_output(*self.in_flight.popleft())
            for result in results.values():
                self.parts.append({part.request_id for part in result.outputs})
                processed = self.processor.process_outputs(result.outputs)
                for output in processed.request_outputs:
                    self.outputs[output.request_id] = output

    def run(self, requests):
        """Run until all requests have ended. They come and some are aborted at given steps."""
        last = max(request.comes for request in requests)
        for time in range(10_000):
            for request in requests:
                if request.comes == time:
                    self.add(request)
                if request.is_aborted == time:
                    self.abort(request)
            self.step()
            if time >= last and not self.is_busy():
                break
        assert not self.is_busy()
        assert not self.model.requests  # they were told of every end
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM keeps one
        assert self.scheduler.reset_prefix_cache()
        return self


def random_request(rng, name, prompt, last_arrival):
    max_tokens = rng.choice([rng.randrange(1, 130), rng.randrange(1, 130), LENGTH])
    kind = rng.choice([{}] * 7 + [{"detokenize": True}, {"logprobs": None}, {"logprobs": 2}])
    params = {"seed": rng.randrange(1000), "max_tokens": max_tokens, "logprobs": 0,
              "flat_logprobs": True, "detokenize": False} | kind
    return SimpleNamespace(
        name=name, prompt=prompt, params=params,
        comes=rng.choice([0, 0, rng.randrange(last_arrival + 1)]),
        is_aborted=rng.choice([None, None, None, None, rng.randrange(last_arrival, 200)]))


def random_case(seed):
    rng = random.Random(seed)
    n_at_once = rng.choice([4, 16, 64])
    budget = max(n_at_once, rng.choice([64, 256, 4096]))  # of a step: prefill comes in chunks
    case = SimpleNamespace(
        n_blocks=rng.choice([40, 60, 100, 500]), n_at_once=n_at_once, budget=budget,
        caching=rng.random() < 0.6, vocabulary=rng.choice([50, 500, 10**6]),
        windows=rng.choice([[LENGTH], [LENGTH, 32]]), requests=[])
    # Reserved blocks are not there for a late arrival, so it may start later if there are few.
    last_arrival = 150 if case.n_blocks == 500 else 0
    for group in range(rng.choice([1, 2, 6])):
        prompt = [rng.randrange(1000) for _ in range(rng.choice([1, 30, 90, 200]))]
        for index in range(4):
            case.requests.append(random_request(rng, f"{group}-{index}", prompt, last_arrival))
    return case


def run(folder, case, is_ours=True):
    return Engine(folder, case, is_ours).run(case.requests)


@pytest.mark.parametrize("seed", range(30))
def test_random_requests_get_the_same(seed, folder):
    case = random_case(seed)
    expected = run(folder, case, is_ours=False)
    engine = run(folder, case)
    assert engine.n_steps == expected.n_steps
    assert engine.outputs.keys() == expected.outputs.keys()
    for name, output in expected.outputs.items():
        assert engine.outputs[name].outputs == output.outputs
        assert engine.outputs[name].num_cached_tokens == output.num_cached_tokens


def simple_case(n_requests=8, **params):
    """100 tokens for each request, all at once"""
    params = {"seed": 0, "max_tokens": 100, "logprobs": 0, "detokenize": False} | params
    requests = [SimpleNamespace(name=str(index), prompt=[5, 6, 7], params=params, comes=0,
                                is_aborted=None) for index in range(n_requests)]
    return SimpleNamespace(n_blocks=500, n_at_once=8, budget=64, caching=True, vocabulary=10**6,
                           windows=[LENGTH], requests=requests)


def test_most_tokens_come_in_few_parts(folder):
    engine = run(folder, simple_case())
    # Of a response: its first token, then up to four turns, then the rest.
    assert all(n_parts <= 6 for n_parts in engine.n_parts().values())


def test_few_responses_have_their_turn_at_a_step(folder):
    engine = run(folder, simple_case())
    # All have their first token at the same step, and their last.
    assert sorted(len(parts) for parts in engine.parts)[-3] == 1


@pytest.mark.parametrize("params", [{"detokenize": True}, {"logprobs": None}, {"logprobs": 2}])
def test_other_requests_go_the_way_of_vllm(params, folder):
    engine = run(folder, simple_case(**params))
    assert set(engine.n_parts().values()) == {100}


@pytest.fixture
def decisions():
    """Counts how often vLLM's own code decides what a step does."""
    from vllm.v1.core.sched.scheduler import Scheduler
    own = Scheduler.schedule
    with mock.patch.object(Scheduler, "schedule", autospec=True, side_effect=own) as decisions:
        yield decisions


def test_most_steps_are_repeated(folder, decisions):
    engine = run(folder, simple_case())
    assert engine.n_steps >= 100
    assert decisions.call_count <= 6


def test_no_step_is_repeated_while_a_request_waits(folder, decisions):
    run(folder, simple_case(n_requests=9))  # eight run at once
    assert decisions.call_count >= 100


def test_no_step_is_repeated_with_mamba_layers(folder, decisions):
    case = simple_case()
    engine = Engine(folder, case)
    engine.scheduler.has_mamba_layers = True
    assert engine.run(case.requests).n_steps == decisions.call_count


@pytest.mark.parametrize("n_blocks", [5, 6, 7])
def test_nobody_is_preempted_for_a_reservation(n_blocks, folder):
    n_steps = run(folder, simple_case(n_requests=1, max_tokens=40)).n_steps
    for n_prompt in range(1, BLOCK + 1):
        case = simple_case(n_requests=1, max_tokens=40)
        case.requests[0].prompt = [5] * n_prompt
        case.n_blocks = n_blocks
        assert run(folder, case).n_steps == n_steps


def test_it_is_made_for_the_required_version():
    from rollout_scheduler import VLLM_VERSION
    assert f"\nvllm=={VLLM_VERSION}\n" in (HERE / "requirements.txt").read_text()


# With real models. A process of its own starts the engines, one after the other.

def save_model(family, folder):
    """A model with random weights and a tokenizer with a character for each token"""
    from tokenizers import Tokenizer, decoders, models
    from transformers import (AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig,
                              PreTrainedTokenizerFast)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
             "initializer_range": 0.2, "max_position_embeddings": LENGTH}
    config = LlamaConfig(**sizes)
    if family == "gemma3":
        config = Gemma3TextConfig(**sizes, sliding_window=32, pad_token_id=0,
                                  layer_types=["sliding_attention", "full_attention"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {chr(token): token for token in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def start_vllm(folder, n_blocks, scheduler):
    from vllm import LLM
    return LLM(str(folder), dtype="float32", enforce_eager=True, enable_chunked_prefill=False,
               max_num_batched_tokens=4096, max_model_len=LENGTH, max_num_seqs=8, block_size=32,
               kv_cache_memory_bytes=2**26, num_gpu_blocks_override=n_blocks,
               logprobs_mode="processed_logprobs", scheduler_cls=scheduler)


def generate(llm, stop=()):
    """-> everything that vLLM says of the responses to random prompts"""
    from vllm import SamplingParams
    rng = random.Random(0)
    prompts, params = [], []
    for index in range(12):
        ids = [rng.randrange(128) for _ in range(rng.randrange(2, 60))]
        prompts.append({"prompt_token_ids": ids})
        params.append(SamplingParams(
            seed=index, max_tokens=rng.choice([1, 50, 120, LENGTH]), stop_token_ids=[7],
            logprobs=rng.choice([0, 0, 0, 0, None, 2]), flat_logprobs=True, ignore_eos=True,
            temperature=rng.choice([0, 1, 1]), stop=list(stop), detokenize=bool(stop),
            include_stop_str_in_output=True))
    responses = llm.generate(prompts, params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    return [repr(response.outputs[0]) for response in responses]


def interrupt(llm, n_steps):
    """Press Ctrl-C after some steps of a rollout."""
    engine = llm.llm_engine
    steps = [engine.step] * n_steps + [mock.Mock(side_effect=KeyboardInterrupt)]
    with mock.patch.object(engine, "step", lambda: steps.pop(0)()):
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])


def real_rollouts(family, folder, is_ours):
    """-> {rollout: its responses}, and how often steps were repeated and requests preempted"""
    from rollout_scheduler import RolloutScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    llm = start_vllm(folder, FAMILIES[family], RolloutScheduler if is_ours else None)
    own = RolloutScheduler.repeat, Scheduler._preempt_request
    repeat = mock.patch.object(RolloutScheduler, "repeat", autospec=True, side_effect=own[0])
    preempt = mock.patch.object(Scheduler, "_preempt_request", autospec=True, side_effect=own[1])
    with repeat as repeat, preempt as preempt:
        result = {"first": generate(llm), "stop strings": generate(llm, stop="abcdefgh")}
        if is_ours:
            interrupt(llm, n_steps=50)
            result["after ctrl-c"] = generate(llm)
    counts = {"n_repeated": repeat.call_count, "n_preempted": preempt.call_count}
    llm.llm_engine.engine_core.shutdown()
    return result | counts


def main(folder):
    results = {}
    for family in FAMILIES:
        save_model(family, folder / family)
        for is_ours in (False, True):
            name = f"{family} {'ours' if is_ours else 'vLLM'}"
            results[name] = real_rollouts(family, folder / family, is_ours)
    (folder / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, __file__, folder], check=True, timeout=300)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_real_rollouts_are_the_same(family, real):
    ours, expected = real[f"{family} ours"], real[f"{family} vLLM"]
    assert ours["first"] == expected["first"]
    assert ours["stop strings"] == expected["stop strings"]
    assert ours["after ctrl-c"] == expected["first"]


@pytest.mark.parametrize("family", FAMILIES)
def test_real_rollouts_have_every_case(family, real):
    ours = real[f"{family} ours"]
    assert ours["n_repeated"] > 30
    assert ours["n_preempted"] > 0
    reasons = "".join(ours["first"] + ours["stop strings"])
    for reason in ("stop_reason=7", "stop_reason=[a-h]", "finish_reason=length"):
        assert re.search(reason, reasons)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
