"""Any sequence of add, abort, step and new weights, with every invariant checked after each move."""

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpaged.core.prefix_cache import sha256
from jaxpaged.errors import InvalidRequestError, RequestTooLargeError
from tests.core.simulated_device import Driver

VOCAB_SIZE, EOS, STOP = 24, 0, 1
STEMS = [[5] * 40, [5, 6] * 20, [7, 8, 9, 10, 11] * 8]  # prompts begin alike, and repeat themselves
HASHES = {
    "sha256": sha256,
    "constant": lambda data: b"",
    "two bits": lambda data: bytes([hashlib.sha256(data).digest()[0] & 3]),
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        overlap=st.sampled_from([1, 1, 0, 2]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        pool_tokens=st.sampled_from([16, 24, 40, 64]),
        max_num_seqs=st.integers(2, 5),
        spare_tokens=st.sampled_from([0, 1, 3, 8, 40]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        hash_name=st.sampled_from(["sha256", "sha256", "sha256", *HASHES]),
    )
    def start(self, pool_tokens, block_size, max_num_seqs, spare_tokens, hash_name, **options):
        self.driver = Driver(
            num_blocks=pool_tokens // block_size,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=40,
            vocab_size=VOCAB_SIZE,
            hash_function=HASHES[hash_name],
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
        max_tokens=st.sampled_from([1, 2, 8, 20, None]),
        min_tokens=st.sampled_from([0, 1]),
        ends=st.sampled_from([{}, {}, {"eos": [EOS]}, {"eos": [EOS], "ignore_eos": True, "stop_token_ids": [STOP]}]),
    )
    def add(self, prompts, ends, **options):
        driver = self.driver
        for prompt in prompts:
            self.count += 1
            name = f"r{self.count}"
            too_long = len(prompt) > driver.max_model_len - 1
            too_large = driver.manager.blocks_for(len(prompt) + 1) > driver.manager.num_blocks
            try:
                driver.add(name, prompt, **ends, **options)
            except RequestTooLargeError:
                assert too_long or too_large
            except InvalidRequestError:
                assert not prompt
            else:
                assert prompt and not too_long and not too_large
                self.resets[name] = driver.device.weights

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(list(self.driver.requests)))
        alive = name not in self.driver.finished
        assert (self.driver.abort(name) is not None) == alive

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
        for name, update in driver.finished.items():
            assert driver.streamed[name] == driver.requests[name].output_token_ids
            if update.finish_reason != "abort" and self.resets[name] == driver.device.weights:
                driver.check_solo(name)
        super().teardown()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
