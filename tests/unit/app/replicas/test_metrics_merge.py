"""Metrics of several replicas on one page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from app.replicas.metrics_merge import merged

PAGE = """\
# HELP requests_total Requests, {all} of them.
# TYPE requests_total counter
requests_total{route="/v1/jobs/{id}",outcome="a \\"b\\""} 3.0
# HELP up Whether it is.
# TYPE up gauge
up 1.0
"""


def test_each_number_says_whose_it_is_and_families_stay_together() -> None:
    page = merged({"a": PAGE, "b": PAGE.replace("3.0", "4.0")})
    families = list(text_string_to_metric_families(page))
    assert [one.name for one in families] == ["requests", "up"]
    requests, up = families
    assert [(one.labels["replica"], one.value) for one in requests.samples] == [("a", 3.0), ("b", 4.0)]
    assert requests.samples[0].labels["outcome"] == 'a "b"'
    assert [one.labels for one in up.samples] == [{"replica": "a"}, {"replica": "b"}]
    assert page.count("# TYPE up gauge") == 1


def test_no_replica_no_metrics() -> None:
    assert merged({}) == ""
