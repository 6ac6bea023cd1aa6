import httpx2 as httpx
import pytest

from gspo_env.serving import PolicyServer


@pytest.fixture(scope="module")
def address():
    resources = PolicyServer()
    yield resources
    resources.close()


@pytest.fixture
def opened(address):
    """Opens a session and returns a client that posts to it."""
    resources = []

    def make(policy, **terms):
        session = address.open(policy, **terms)
        headers = {"authorization": f"Bearer {session.key}"}
        client = httpx.Client(base_url=session.url, headers=headers, timeout=10)
        resources.append((session, client))
        client.session = session
        return client

    yield make
    for session, client in resources:
        client.close()
        session.close()
