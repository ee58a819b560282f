"""Any sequence of add, abort, step and new weights, with every invariant checked after each move."""

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.core.prefix_cache import sha256
from jaxpaged.core.step_sizes import StepSizes
from jaxpaged.errors import InvalidRequestError, QueueFullError, RequestTooLargeError
from tests.core.driver import Driver
from tests.core.solo import FakeGrammar

VOCAB_SIZE, EOS, STOP = 24, 0, 1
STEMS = [[5] * 40, [5, 6] * 20, [7, 8, 9, 10, 11] * 8]  # prompts begin alike, and repeat themselves
HASHES = {
    "sha256": sha256,
    "constant": lambda data: b"",
    "two bits": lambda data: bytes([hashlib.sha256(data).digest()[0] & 3]),
}
KEYS = {
    "none": None,
    "arrival": lambda request: request.arrival_time,
    "priority": lambda request: (request.priority, request.arrival_time),
    "longest": lambda request: -request.num_prompt_tokens,
}
GRAMMARS = st.builds(
    FakeGrammar,
    st.just(VOCAB_SIZE),
    st.integers(1, 12),
    st.sampled_from(["", "", "", "refuses", "raises", "cannot fill"]),
    st.integers(0, 4),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        overlap=st.sampled_from([1, 1, 0, 2]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        pool_tokens=st.sampled_from([16, 24, 40, 64]),
        max_num_seqs=st.integers(2, 5),
        spare_tokens=st.sampled_from([0, 1, 3, 8, 40]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        search_limit=st.sampled_from([1, 2, 1024]),
        hash_name=st.sampled_from(["sha256", "sha256", "sha256", *HASHES]),
        burst=st.booleans(),
        max_steps=st.sampled_from([1, 2, 3, 8]),
        key=st.sampled_from(list(KEYS)),
        num_host_blocks=st.sampled_from([0, 0, 2, 5, 100]),
        max_num_queued_requests=st.sampled_from([None, None, 6]),
        sizes=st.sampled_from([(), (2, 4, 8, 16, 32, 64), (3, 5, 6, 7, 9, 12, 50)]),
        step_cost=st.sampled_from([0, 3]),
    )
    def start(
        self,
        pool_tokens,
        block_size,
        max_num_seqs,
        spare_tokens,
        hash_name,
        key,
        num_host_blocks,
        max_num_queued_requests,
        sizes,
        step_cost,
        **options,
    ):
        self.max_num_queued = max_num_queued_requests
        most = max_num_seqs + max(spare_tokens, 1)  # the last size is the limit, as in an engine
        sizes = [*(n for n in sizes if n < most), most] if sizes else []
        self.driver = Driver(
            num_blocks=pool_tokens // block_size,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=40,
            vocab_size=VOCAB_SIZE,
            hash_function=HASHES[hash_name],
            scheduler_options={
                "key": KEYS[key],
                "num_host_blocks": num_host_blocks,
                "max_num_queued_requests": max_num_queued_requests,
                "step_sizes": StepSizes(lambda: sizes, step_cost),
            },
            **options,
        )
        self.count = 0
        self.resets: dict[str, int] = {}

    @rule(
        prompts=st.lists(
            st.builds(
                lambda stem, length, tail: stem[:length] + tail,
                st.sampled_from(STEMS),
                st.one_of(st.sampled_from([4, 8, 16]), st.integers(1, 12), st.integers(0, 41)),
                st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=2),
            ),
            min_size=1,
            max_size=5,
        ),
        cache_salt=st.sampled_from([None, None, None, "", "a"]),
        priority=st.integers(-1, 2),
        samples=st.sampled_from([{}, {}, {}, {"n": 2}, {"n": 5}, {"n": 1, "best_of": 3, "output_kind": "final"}]),
        max_tokens=st.sampled_from([1, 2, 8, 20, None]),
        min_tokens=st.sampled_from([0, 1]),
        timeout=st.sampled_from([None, None, None, 0, 3, 12]),
        logprobs=st.sampled_from([None, None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 1]),
        grammar=st.one_of(st.none(), st.none(), GRAMMARS),
        ends=st.sampled_from([{}, {}, {"eos": [EOS]}, {"eos": [EOS], "ignore_eos": True, "stop_token_ids": [STOP]}]),
    )
    def add(self, prompts, ends, samples, **options):
        driver = self.driver
        n = samples.get("best_of", samples.get("n", 1))
        for prompt in prompts:
            self.count += 1
            name = f"r{self.count}"
            too_long = len(prompt) > driver.max_model_len - 1
            too_large = driver.manager.blocks_for(len(prompt) + 1) > driver.manager.num_blocks
            waiting, limit = driver.scheduler.num_waiting, self.max_num_queued
            try:
                driver.add(name, prompt, **samples, **ends, **options)
            except RequestTooLargeError:
                assert too_long or too_large
            except InvalidRequestError:
                assert not prompt
            except QueueFullError:
                assert limit is not None and waiting and waiting + n > limit
            else:
                assert prompt and not too_long and not too_large
                assert limit is None or not waiting or waiting + n <= limit
                self._note_weights(name)

    @rule(
        stem=st.sampled_from(STEMS),
        lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
        pooling=st.sampled_from(["last", "mean"]),
        timeout=st.sampled_from([None, None, 9]),
        cache_salt=st.sampled_from([None, "a"]),
    )
    def embed(self, stem, lengths, **options):
        driver = self.driver
        for length in lengths:
            self.count += 1
            try:
                driver.add(f"r{self.count}", stem[:length], **options)
            except RequestTooLargeError:
                assert driver.manager.blocks_for(length) > driver.manager.num_blocks
            except QueueFullError:
                continue
            else:
                self._note_weights(f"r{self.count}")

    @rule(length=st.integers(1, 12), prompt_logprobs=st.integers(0, 2))
    def score_a_prompt(self, length, prompt_logprobs):
        self.count += 1
        try:
            self.driver.add(f"r{self.count}", STEMS[0][:length], max_tokens=0, prompt_logprobs=prompt_logprobs)
        except (QueueFullError, RequestTooLargeError):
            return
        self._note_weights(f"r{self.count}")

    @rule(
        prompt=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=14),
        width=st.integers(1, 4),
        data=st.data(),
        max_tokens=st.sampled_from([1, 3, 9, None]),
        eos=st.sampled_from([[], [EOS, STOP, 2]]),
        early_stopping=st.sampled_from([True, False, "never"]),
        timeout=st.sampled_from([None, None, 9]),
        **{name: st.sampled_from([None, None, 2]) for name in ("logprobs", "prompt_logprobs")},
    )
    def search(self, prompt, width, data, **options):
        self.count += 1
        n = data.draw(st.integers(1, width))
        try:
            self.driver.add(f"r{self.count}", prompt, use_beam_search=True, beam_width=width, n=n, **options)
        except (QueueFullError, RequestTooLargeError):
            return
        self._note_weights(f"r{self.count}")

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole):
        key = data.draw(st.sampled_from(list(self.driver.requests)))
        request = self.driver.requests[key]
        whole = whole or request.params.use_beam_search
        updates = self.driver.abort(request.request_id, None if whole else request.index)
        assert key in self.driver.finished
        if not whole:
            assert len(updates) <= 1
        assert request.request_id not in self.driver.scheduler._requests or not whole

    @rule(n=st.integers(1, 12))
    def step(self, n):
        for _ in range(n):
            self.driver.step()

    @precondition(lambda self: self.count % 3 == 0)
    @rule()
    def reset_weights(self):
        self.driver.reset_weights()

    @invariant()
    def check(self):
        if hasattr(self, "driver"):
            self.driver.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        assert driver.finished.keys() == driver.requests.keys()
        for key in driver.finished:
            if not driver.requests[key].params.use_beam_search:
                assert driver.streamed[key] == driver.requests[key].output_token_ids
            if self.resets[key] == driver.device.weights:
                driver.check_solo(key)
        super().teardown()

    def _note_weights(self, name):
        for key, request in self.driver.requests.items():
            if request.request_id == name:
                self.resets[key] = self.driver.device.weights


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
