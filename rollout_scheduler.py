"""A faster scheduler for vLLM. It is optional: starter.py works without this file.

vLLM's own scheduler calls about 80 Python functions per token. With 512 responses at once that
takes longer than a step of the GPU, so the GPU waits. This scheduler avoids most of these calls:
1. Plain tokens, which end nothing, are held back until the response ends or 32 steps are over.
2. While all requests just decode, the last step is repeated, in memory reserved 32 steps ahead.
Everything else goes vLLM's own way. Tokens and log-probs are the same as without this file.
"""
import numpy as np
import vllm

VLLM_VERSION = "0.32.0"  # whose internals are used
if vllm.__version__.split("+")[0] != VLLM_VERSION:
    raise ImportError(f"rollout_scheduler.py is for vLLM {VLLM_VERSION}, not {vllm.__version__}")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

STEPS = 32  # from one turn of vLLM's own code to the next

class RolloutScheduler(AsyncScheduler):
    repetitions_left = 0

    def add_request(self, request):
        request.held = []  # lives as long as the request: an aborted one leaves nothing behind
        request.limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        super().add_request(request)

    def update_from_output(self, scheduled, output):
        """Hold plain tokens back and take them out of what vLLM's own code gets to see."""
        parts = []
        for row, (name, ids) in enumerate(zip(output.req_ids, output.sampled_token_ids)):
            request = self.requests.get(name)  # None if it was aborted
            if request and self.is_plain(request, row, ids):
                request.num_in_flight_tokens -= scheduled.num_scheduled_tokens.pop(name)
                request.num_output_placeholders -= 1
                request.append_output_token_ids(ids[0])
                request.held.append((ids[0], output.logprobs.logprobs[row, 0],
                                     output.logprobs.sampled_token_ranks[row]))
            elif request and request.held:
                held_ids, log_probs, ranks = [np.array(column) for column in zip(*request.held)]
                log_probs = LogprobsLists(held_ids[:, None], log_probs[:, None], ranks)
                parts.append(EngineCoreOutput(name, held_ids.tolist(), log_probs))
                request.held = []
        results = super().update_from_output(scheduled, output)
        result = results.setdefault(0, EngineCoreOutputs())
        result.outputs = parts + result.outputs
        return results

    def is_plain(self, request, row, ids):
        """Return whether vLLM's own code would only add this token and its log-prob."""
        params = request.sampling_params
        return (len(ids) == 1 and ids[0] not in params.all_stop_token_ids
                and params.num_logprobs == 0 and not params.detokenize
                # vLLM's report on the prompt comes with the first token.
                and 0 < request.num_output_tokens and request.num_tokens + 1 < request.limit
                # A token that was in flight when its request was preempted is counted differently.
                and request.num_stale_output_tokens == 0
                # Every 32nd token hands over the others: a few requests per step, not all at once.
                and (request.num_tokens + row) % STEPS != 0)

    def schedule(self, *args):
        """Repeat the last step if memory is reserved for it and no request waits."""
        n_running, n_waiting = self.get_request_counts()
        if self.repetitions_left and not n_waiting:
            return self.repeat()
        # The tokens of this step and its repetitions fill at most so many blocks of the cache.
        n_blocks = n_running * (1 + STEPS // self.cache_config.block_size)
        n_blocks *= len(self.kv_cache_config.kv_cache_groups)
        is_full = n_blocks > self.kv_cache_manager.block_pool.get_num_free_blocks()
        is_prefill = any(request.is_prefill_chunk for request in self.running)
        # Mamba layers keep a state instead of memory per token, so nothing can be reserved.
        is_special = n_waiting or is_prefill or is_full or self.has_mamba_layers
        self.num_lookahead_tokens = 0 if is_special else STEPS
        self.repetitions_left = self.num_lookahead_tokens
        return super().schedule(*args)

    def repeat(self):
        """Return the last step once more, without the requests that have reached their limit."""
        self.repetitions_left -= 1
        requests = [x for x in self.running if x.num_computed_tokens + 1 < x.limit]
        scheduled = SchedulerOutput.make_empty()
        scheduled.finished_req_ids = self.finished_req_ids
        rows = scheduled.scheduled_cached_reqs
        rows.req_ids = [x.request_id for x in requests]
        rows.new_block_ids = [None] * len(requests)
        rows.num_computed_tokens = [x.num_computed_tokens for x in requests]
        rows.num_output_tokens = [x.num_output_tokens + x.num_output_placeholders for x in requests]
        scheduled.num_scheduled_tokens = dict.fromkeys(rows.req_ids, 1)
        scheduled.total_num_scheduled_tokens = len(requests)
        self._update_after_schedule(scheduled)
        return scheduled
