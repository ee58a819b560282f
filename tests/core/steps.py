"""What tests of the scheduler say with a `Driver`."""

import random


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(10, 900), k=length)


def rows_of(driver):
    """The last step as {request id: tokens}."""
    step = driver.last_step
    return {r.request_id: n for r, n in zip(step.requests, step.num_tokens, strict=True)} if step else {}


def step_until(driver, condition, limit=200):
    while not condition():
        driver.step()
        limit -= 1
        assert limit, "it never came"


def scripted(driver, tokens):
    """Makes the device answer with these tokens, one after another."""
    answers = iter(tokens)
    driver.device.sample = lambda prefix: [next(answers)]
