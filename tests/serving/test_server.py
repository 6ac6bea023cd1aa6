"""Sessions, rewards, and what clients may do to the server."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import select
import socket
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2 as httpx
import pytest
from support.jails import eventually, run_python
from support.serving_policy import Policy, hang_up

from gspo_env.chat import fields
from gspo_env.errors import ConfigError
from gspo_env.serving import LateRewardError, PolicyServer, Reply, address, app, connection
from gspo_env.serving.dialects.chat import Chat
from gspo_env.types import Message

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
DONE = Reply(message=Message(role="assistant", content="done"))


def post(client, path="/chat/completions", body=HI, **more):
    return client.post(path, json=body, **more)


def ask(client, session):
    """Asks with the key of a session; returns the response, which is an answer."""
    headers = {"x-api-key": session.key}
    got = client.post(f"{session.url}/chat/completions", json=HI, headers=headers)
    assert got.status_code == 200
    return got


def test_a_reward_reaches_its_turn_while_the_step_runs(opened):
    rewards, late = {}, []

    def reward(name, value):
        if name in late:
            raise LateRewardError("too late")
        rewards[name] = value

    client = opened(Policy(), reward=reward)
    name = post(client).json()["id"]
    reward_body = {"completion_id": name, "reward": 0.25}
    assert post(client, "/reward", reward_body).json() == reward_body
    assert rewards == {name: 0.25}
    assert post(client, "/reward", {**reward_body, "completion_id": "other"}).status_code == 404
    late.append(name)
    assert post(client, "/reward", reward_body).status_code == 409


@pytest.mark.parametrize(
    ("value", "status"),
    [
        *((value, 422) for value in ("null", '"1"', "true", str(10**400), "[1]", "{}")),
        *((value, 400) for value in ("NaN", "Infinity", "1e999")),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused(opened, value, status):
    client = opened(Policy(), reward=lambda name, value: None)
    body = f'{{"completion_id": "{post(client).json()["id"]}", "reward": {value}}}'
    assert client.post("/reward", content=body).status_code == status


def test_a_wrong_key_is_refused_and_the_key_of_a_closed_session_is_gone(opened):
    client = opened(Policy())
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": client.session.key}):
        assert httpx.get(f"{client.session.url}/models", headers=headers).status_code == 401
    headers = {"x-api-key": client.session.key}
    assert httpx.get(f"{client.session.url}/models", headers=headers).status_code == 200
    client.session.close()
    client.session.close()
    assert post(client).status_code == 410


def test_one_session_does_not_see_the_answers_of_another(opened):
    mine, other = opened(Policy(), reward=print), opened(Policy(), reward=print)
    name = post(mine).json()["id"]
    reward_body = {"completion_id": name, "reward": 1}
    assert post(other, "/reward", reward_body).status_code == 404


def test_the_end_of_a_session_ends_its_open_requests(opened):
    futures = []
    client = opened(lambda request: futures.append(Future()) or futures[-1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, client)
        assert eventually(lambda: futures)
        client.session.close()
        assert waiting.result().status_code == 410
    assert futures[0].cancelled()


def test_a_program_that_hangs_up_cancels_its_request(opened):
    futures = []
    client = opened(lambda request: futures.append(Future()) or futures[-1])
    hang_up(client.session.url, client.session.key, "hi", lambda: futures)
    assert eventually(lambda: futures[0].cancelled())


def test_many_programs_at_once_and_nothing_is_left(address):
    async def answer(request):
        await asyncio.sleep(0.01)
        return DONE

    def play(n):
        session = address.open(answer)
        with httpx.Client(timeout=30) as client:
            codes = [ask(client, session).status_code for _ in range(3)]
        session.close()
        return codes

    before = threading.active_count()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(play, range(32))) == [[200] * 3] * 32
    state = address._server.server_state
    assert eventually(lambda: not state.connections and not state.tasks)
    assert not address._sessions
    assert threading.active_count() <= before + 1


def test_the_end_of_a_session_leaves_an_idle_connection_to_the_next_one_of_its_client(address):
    """A client whose connection was ended while it is idle would meet an error at its next use."""
    with httpx.Client(timeout=30) as client:
        ports = []
        for _ in range(20):
            one, two = address.open(Policy()), address.open(Policy())
            for session in (one, two):
                got = ask(client, session)
                stream = got.extensions["network_stream"]
                ports.append(stream.get_extra_info("client_addr"))
                session.close()
                assert eventually(lambda session=session: not session.connections)
        assert len(set(ports)) == 1


def test_the_end_of_a_session_spares_a_request_of_another_one_on_the_same_connection(address):
    async def slow(request):
        await asyncio.sleep(1.5)
        return DONE

    one, two = address.open(Policy()), address.open(slow)
    with httpx.Client(timeout=30) as client:
        for session in (one, two):
            if session is two:
                threading.Timer(0.2, one.close).start()
            ask(client, session)
    two.close()


def test_an_idle_connection_makes_room_for_a_new_one(opened, address, monkeypatch):
    state = address._server.server_state
    idle = opened(Policy())
    assert post(idle).status_code == 200
    with monkeypatch.context() as patch, raw(idle.session, b"POST ") as silent:
        assert eventually(lambda: len(state.connections) >= 2)
        patch.setattr(connection, "MOST", 1)
        assert post(opened(Policy())).status_code == 200
        assert post(opened(Policy())).status_code == 200
        assert closed(silent)
    assert eventually(lambda: len(state.connections) <= 2)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{" * 100_000, b"[" * 100_000),
        b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": ' + b"9" * 10_000 + b"}",
        json.dumps({**HI, "tools": [{"type": "function"}]}).encode(),
        json.dumps({**HI, "tools": [{"function": {"name": "a b"}}]}).encode(),
        json.dumps({**HI, "messages": [None]}).encode(),
    ],
)
def test_a_body_that_is_no_request_is_one_error(opened, body):
    got = opened(Policy()).post("/chat/completions", content=body)
    assert got.status_code == 400
    assert len(got.json()["error"]["message"]) < 500


def arguments(text):
    """A body with a call whose arguments are a text."""
    call = {"id": "1", "function": {"name": "f", "arguments": text}}
    said = {"role": "assistant", "tool_calls": [call]}
    return json.dumps({**HI, "messages": [said, *HI["messages"]]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"[]," * 10**6 + b"0]}",
        b'{"messages": [' + b'"",' * 10**6 + b'""]}',
        b'{"messages": [' + b'"\\\\",' * 700_000 + b'""]}',
        b"{" + b",".join(b'"%d":{}' % n for n in range(300_000)) + b"}",
        b'{"messages": [' + b"0," * 10**6 + b"0]}",
        b'{"x": "\\"]", "messages": ' + b"[" * 101 + b"]" * 101 + b"}",
        json.dumps({"messages": [[]] * 200_000}).encode("utf-16"),
        arguments("[" + "[]," * 200_000 + "0]"),
        arguments('{"a":' + "[" * 101 + "]" * 101 + "}"),
    ],
    ids=lambda body: f"{body[:20]}{len(body)}",
)
def test_structure_is_counted_before_a_body_is_parsed(opened, body, monkeypatch):
    parse = json.loads

    def loads(text, **more):
        assert text.startswith('{"model"'), "parsed"
        return parse(text, **more)

    monkeypatch.setattr(fields.json, "loads", loads)
    response = opened(Policy()).post("/chat/completions", content=body)
    monkeypatch.undo()
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_brackets_in_texts_are_no_structure(opened):
    policy, text = Policy(), '[{,"\\' * 150_000
    body = {**HI, "messages": [{"role": "user", "content": text}]}
    assert post(opened(policy), body=body).status_code == 200
    assert policy.seen[0].messages[0].content == text


def test_other_requests_go_on_while_a_large_body_is_read(opened, monkeypatch):
    client, reads, go_on = opened(Policy()), threading.Event(), threading.Event()
    read = Chat.read

    def slow(self, body, *more):
        if len(body["messages"]) > 1:
            reads.set()
            assert go_on.wait(10)
        return read(self, body, *more)

    monkeypatch.setattr(Chat, "read", slow)
    large = {**HI, "messages": [{"role": "user", "content": "x" * 2**16}] * 2}
    with ThreadPoolExecutor() as pool:
        response = pool.submit(post, client, body=large)
        assert reads.wait(10)
        assert post(client).status_code == 200
        go_on.set()
        assert response.result().status_code == 200


def test_lone_surrogates_do_not_reach_the_policy(opened):
    policy = Policy()
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
    assert opened(policy).post("/chat/completions", content=body).status_code == 200
    assert policy.seen[0].messages[0].content == "a?b"


def test_a_huge_body_is_refused_before_it_is_read(opened, monkeypatch):
    monkeypatch.setattr(app, "LARGEST_BODY", 1000)
    client = opened(Policy())
    assert client.post("/chat/completions", content=b"x" * 2000).status_code == 413
    assert client.post("/chat/completions", content=iter([b"x" * 600] * 2)).status_code == 413


def raw(session, data):
    """Sends bytes and returns the open socket."""
    host, port = session.url.removeprefix("http://").removesuffix("/v1").split(":")
    resource = socket.create_connection((host, int(port)), timeout=10)
    resource.sendall(data)
    return resource


def head(session, *lines):
    start = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"x-api-key: {session.key}"]
    return "\r\n".join([*start, *lines, "", ""]).encode()


def closed(resource):
    """Returns whether the server ends a connection."""
    with contextlib.suppress(ConnectionError):
        while resource.recv(65536):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"POST /v1/chat HTTP/1.1\r\nA: b\r\n"])
def test_a_client_that_sends_no_head_is_cut_off(opened, monkeypatch, sent):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    with raw(opened(Policy()).session, sent) as resource:
        assert closed(resource)


def test_a_client_whose_body_is_slow_is_cut_off(opened, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    session = opened(Policy()).session
    with raw(session, head(session, "Content-Length: 100") + b"{") as resource:
        assert resource.recv(100).startswith(b"HTTP/1.1 408")
        assert closed(resource)


@pytest.mark.parametrize(
    ("line", "answers"), [("Content-Length: 2", 1), ("Content-Length: 4000", 1), ("A: b", 2)]
)
def test_a_request_of_two_lengths_is_answered_and_its_connection_closed(opened, line, answers):
    """What follows may be a request that somebody has smuggled into the body of another's."""
    session, body = opened(Policy()).session, json.dumps(HI).encode()
    request = head(session, line, "Transfer-Encoding: chunked")
    request += b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    read = b""
    with raw(session, request + request) as resource, contextlib.suppress(ConnectionError):
        while read.count(b"HTTP/1.1 200") < 2 and (more := resource.recv(65536)):
            read += more
    assert read.count(b"HTTP/1.1 200") == answers


@pytest.mark.parametrize("end", ["limit", "session"])
def test_a_stream_that_is_never_read_ends_with_a_limit_and_with_its_session(
    opened, monkeypatch, end
):
    if end == "limit":
        monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    session = opened(Policy("x" * 20_000_000)).session
    body = json.dumps({**HI, "stream": True}).encode()
    with raw(session, head(session, f"Content-Length: {len(body)}") + body):
        assert eventually(lambda: session.connections)
        if end == "session":
            session.close()
        assert eventually(lambda: not session.connections)


def test_connections_are_limited(opened, address, monkeypatch):
    client = opened(Policy())
    state = address._server.server_state
    with monkeypatch.context() as patch:
        patch.setattr(connection, "MOST", 3)
        resource = [raw(client.session, b"") for _ in range(6)]
        # the server has closed three
        assert eventually(lambda: len(select.select(resource, [], [], 0)[0]) == 3)
        assert len(state.connections) <= 3
        for one in resource:
            one.close()
    assert eventually(lambda: not state.connections)
    assert post(client).status_code == 200


def test_names_with_line_breaks_reach_no_header(opened):
    client = opened(Policy(), model="m\r\nx-evil: 1")
    for name in ("a\r\nx-evil: 1", "ä" * 1000):
        got = post(client, body={**HI, "model": name, "user": name})
        assert got.status_code == 200
        assert "x-evil" not in got.headers
    assert "x-evil" not in client.get("/models").headers
    session = client.session
    with raw(session, head(session, "X-Agent: a\x00b")) as resource:
        assert resource.recv(100).startswith(b"HTTP/1.1 400")


def test_what_is_not_served_is_an_error_in_json(opened):
    client = opened(Policy())
    assert client.post("/embeddings", json={}).json()["error"]["type"] == "not_found_error"
    assert client.get("/chat/completions").status_code == 405


def test_the_address_starts_at_its_first_use_and_ends_with_the_process():
    program = (
        "from gspo_env.serving import address\n"
        "import threading\n"
        "assert threading.active_count() == 1\n"
        "assert address() is address()\n"
        "async def never(request):\n"
        "    import asyncio; await asyncio.Event().wait()\n"
        "address().open(never)\n"
        "print(address().host)\n"
    )
    done = run_python("-c", program, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "127.0.0.1", "")


def fork_and_answer(pipe):
    session = address().open(Policy())
    pipe.send((session.url, ask(httpx, session).status_code))
    pipe.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gets_an_address_of_its_own(opened):
    session = address().open(Policy())
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = context.Process(target=fork_and_answer, args=(theirs,))
        child.start()
    theirs.close()
    assert ours.poll(60)
    place, answered = ours.recv()
    child.join(30)
    assert (place != session.url, answered) == (True, 200)
    headers = {"x-api-key": session.key}
    assert httpx.get(f"{session.url}/models", headers=headers).status_code == 200
    session.close()


def test_a_forked_child_keeps_no_socket_of_the_server():
    server = PolicyServer()
    session = server.open(Policy())
    session.listen(listener := socket.create_server(("127.0.0.1", 0)))
    places = [(server.host, server.port), listener.getsockname()]
    clients = [socket.create_connection(place) for place in places]
    for client in clients:
        request = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: {session.key}\r\n\r\n"
        client.sendall(request.encode())
        assert client.recv(12) == b"HTTP/1.1 200"
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(theirs)
        os.read(ours, 1)  # until the parent closes its end
        os._exit(0)
    session.close()
    server.close()
    for place, client in zip(places, clients, strict=True):
        client.settimeout(20)
        while client.recv(65536):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        client.close()
    os.close(theirs)
    assert os.waitpid(child, 0)[1] == 0


def test_a_key_that_another_session_has_is_one_error(address):
    session = address.open(Policy(), key="mine")
    with pytest.raises(ConfigError, match="same key"):
        address.open(Policy(), key="mine")
    session.close()


def test_the_end_of_an_address_ends_its_thread():
    resource = PolicyServer()
    session = resource.open(Policy())
    resource.close()
    resource.close()
    assert not resource._thread.is_alive()
    session.close()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{session.url}/models")
