"""The thread that computes: order, results, failures, end."""

from __future__ import annotations

import threading

import pytest

from spec_serve.api.engine_thread import EngineThread


def test_work_runs_in_order_in_one_thread_and_results_arrive() -> None:
    thread = EngineThread()
    seen: list[int] = []
    futures = [thread.begin(lambda i=i: (seen.append(i), threading.get_ident())) for i in range(5)]  # type: ignore[misc]
    idents = {future.result(60)[1] for future in futures}
    assert seen == [0, 1, 2, 3, 4]
    assert len(idents) == 1 and threading.get_ident() not in idents
    thread.close()
    assert thread.join(60)


def test_a_failure_arrives_where_the_result_is_asked_and_the_thread_goes_on() -> None:
    thread = EngineThread()
    with pytest.raises(ValueError, match="no such model"):
        thread.begin(lambda: (_ for _ in ()).throw(ValueError("no such model"))).result(60)
    assert thread.begin(lambda: 7).result(60) == 7
    assert not thread.join(0.05)
    thread.close()
    assert thread.join(60)
