import torch

from cpref.measure.peak import PeakMemory


def test_the_peak_is_what_was_alive_at_once():
    before = torch.randn(1000)
    with PeakMemory() as peak:
        kept = before + 1  # 4,000 bytes
        passing = kept * 2  # 4,000 more, then gone
        del passing
        again = kept * 3
        view = kept[:10]
        before.mul_(2)
    assert peak.peak_bytes == 8000
    assert peak.live_bytes == 8000
    del again, view
    assert peak.live_bytes == 4000


def test_backward_is_seen_too():
    x = torch.randn(1000, requires_grad=True)
    with PeakMemory() as peak:
        (x * x).sum().backward()
    assert peak.peak_bytes >= 2 * 4000
    assert x.grad is not None
    assert peak.live_bytes == 4000


def test_nothing_is_sent_by_one_process():
    with PeakMemory() as peak:
        torch.randn(10).sum()
    assert peak.sent_bytes == 0
