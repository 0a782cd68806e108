"""What a real worker tells of its prefix cache is what a request then finds there."""

from __future__ import annotations

from pathlib import Path

from memory.page_key import PAGE_TOKENS
from tests.workers.driver import Driver
from tests.workers.process.test_worker import Setup
from workers.wire.prefix_index import Prefix
from workers.wire.protocol import Generate


def test_gateways_hear_what_the_next_request_will_find(tmp_path: Path) -> None:
    llama = Setup(tmp_path, "llama", {"a": {"rank": 4}})
    tokens = list(range(3 * PAGE_TOKENS))
    base = llama.generate(0, tokens, 2, None)
    lora = llama.generate(1, tokens, 2, llama.refs["a"])

    def told(request: Generate) -> int:
        return driver.prefixes.num_cached(Prefix(request), driver.loop.models[0].cache_layout)

    with Driver(llama.config()) as driver:
        driver.run(base)
        before = driver.status
        driver.await_status(lambda status: status is not before)
        assert (told(base), told(lora)) == (3 * PAGE_TOKENS, 0)
        driver.run(lora, llama.generate(2, [*tokens, 1], 2, None))
        assert driver.outputs[2][0].num_cached_tokens == 3 * PAGE_TOKENS
        before = driver.status
        driver.await_status(lambda status: status is not before)
        assert told(lora) == 3 * PAGE_TOKENS
