import resource
import threading
import time

from gspo_env.tracking import system


def test_a_process_without_free_descriptors_keeps_its_readings_of_the_machine(monkeypatch):
    monkeypatch.setattr(system, "_INTERVAL", 0.01)
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with system.SystemMetrics() as metrics:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            time.sleep(0.1)
            metrics.take()
            during = metrics.take()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert during == {}
        assert not died
        assert metrics.take().keys() >= system.read_machine().keys()
