"""What a client of OpenAI's package gets, over HTTP, from a model whose tokens the test chooses."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import openai
import pytest

from shardwise.generation.score import Score
from shardwise.serve.app import MOST_BYTES, make_app
from shardwise.serve.protocol import Served
from shardwise.serve.queue import Queue
from shardwise.serve.scheduler import Scheduler
from shardwise.serve.server import _serve_http, bind
from shardwise.spec.errors import ConfigError
from shardwise.train.data.tokenizer import ByteTokenizer, FolderTokenizer
from tests.common.tokenizers import TEMPLATE, save_tokenizer

SAID = "hello wörld!"
POSITIONS = 64


def soon(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def scored(row, num_top):
    """A token at place ``n`` has the log-probability ``-n / 8``; the likeliest in each place are ``A``, ``B``, ..."""
    top = {ord("A") + rank: -rank / 16 for rank in range(num_top)}
    return Score([-place / 8 for place in range(row.start, len(row.ids))], False, [top] * (len(row.ids) - row.start))


class Hand:
    """A server whose model says :data:`SAID` to every prompt, a token at each call of :meth:`turn`."""

    def __init__(self, tokenizer, max_waiting, api_key, most_connections):
        self.queue = Queue(max_waiting)
        self.scheduler = Scheduler(self.queue, 1, 2)
        self.rows, self.decisions = {}, []
        self.says = tokenizer.encode(SAID)
        self._held = bind("127.0.0.1", 0)
        self.port = self._held.getsockname()[1]
        served = Served("hand", tokenizer, 300, POSITIONS, created=7, max_answers=max_waiting)
        hosts = ["127.0.0.1", "localhost"]
        app = make_app(served, self.queue, lambda: self.scheduler.num_running, hosts=hosts, api_key=api_key)
        self.listening = _serve_http(app, self._held, most_connections)
        self._ends = threading.Event()
        self._thread = None

    def turn(self):
        decision = self.scheduler(0, {number: self.says[at % len(self.says)] for number, at in self.rows.items()})
        self.rows = {number: at + 1 for number, at in self.rows.items() if number not in decision.removed}
        self.rows |= {entry.number: 0 for entry in decision.new}
        self.decisions.append(decision)
        self.scheduler.report([scored(row, num_top) for row, num_top in decision.to_score])
        return decision

    def start(self):
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set() and not self.turn().is_last:
            time.sleep(0.001)

    def stop(self):
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        self.scheduler.fail("the test is over")

    def request(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            text = answer.read()
            return answer, json.loads(text) if answer.getheader("content-type") == "application/json" else text
        finally:
            connection.close()


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr("shardwise.serve.scheduler.IDLE_S", 0.01)
    made = []

    def make_one(tokenizer=None, *, max_waiting=4, api_key=None, starts=True, most_connections=100):
        hand = Hand(tokenizer or ByteTokenizer(), max_waiting, api_key, most_connections)
        hand.listening.__enter__()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{hand.port}/v1", api_key=api_key or "none", max_retries=0)
        made.append((hand, client))
        if starts:
            hand.start()
        return hand, client

    yield make_one
    for hand, client in made:
        hand.stop()
        client.close()
        hand.listening.__exit__(None, None, None)


def complete(client, **given):
    return client.completions.create(**{"model": "hand", "prompt": "x", "max_tokens": 13, "temperature": 0} | given)


def test_completions_come_at_once_or_in_pieces_and_count_tokens(make):
    hand, client = make()
    whole = complete(client)
    assert whole.choices[0].text == SAID
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("text_completion", "hand", "length")
    usage = {"prompt_tokens": 1, "completion_tokens": 13, "total_tokens": 14}
    assert usage.items() <= whole.usage.model_dump().items()
    pieces = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == SAID
    assert len(pieces) == 13  # two bytes make one letter; the last piece counts
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None] * 11 + ["length"]
    assert usage.items() <= pieces[-1].usage.model_dump().items()
    assert pieces[-1].choices == []
    several = complete(client, prompt=["a", "bc"], n=2, max_tokens=5, temperature=1, seed=3)
    assert [(choice.index, choice.text) for choice in several.choices] == [(index, SAID[:5]) for index in range(4)]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 20)
    begun = [entry for decision in hand.decisions for entry in decision.new][-4:]
    assert [(bytes(entry.prompt), entry.seed, entry.stream) for entry in begun] == [
        (b"a", 3, 0), (b"a", 3, 1), (b"bc", 3, 2), (b"bc", 3, 3)
    ]  # fmt: skip
    assert complete(client, prompt=[1, 2, 3], stop=["wör"]).choices[0].text == "hello "
    stopped = list(complete(client, stream=True, stop="o"))
    assert "".join(piece.choices[0].text for piece in stopped) == "hell"
    assert stopped[-1].choices[0].finish_reason == "stop"


def test_logprobs_and_echo_come_with_the_whole_answer(make):
    hand, client = make(most_connections=9)
    answer = complete(client, prompt="abc", max_tokens=3, logprobs=2).choices[0]
    assert (answer.text, answer.finish_reason) == (SAID[:3], "length")
    assert answer.logprobs.tokens == ["h", "e", "l"]
    assert answer.logprobs.token_logprobs == [-3 / 8, -4 / 8, -5 / 8]
    assert answer.logprobs.top_logprobs[1] == {"A": 0, "B": -1 / 16, "e": -4 / 8}
    assert answer.logprobs.text_offset == [0, 1, 2]
    for prompt in ("abc", [[97, 98, 99]]):
        answer = complete(client, prompt=prompt, max_tokens=2, logprobs=1, echo=True).choices[0]
        assert answer.text == "abche"
        assert answer.logprobs.tokens == ["a", "b", "c", "h", "e"]
        assert answer.logprobs.token_logprobs == [None, -1 / 8, -2 / 8, -3 / 8, -4 / 8]
        assert answer.logprobs.top_logprobs == [None, *({"A": 0, t: -n / 8} for n, t in enumerate("bche", 1))]
    several = complete(client, prompt=["a", "bcd"], n=2, max_tokens=0, logprobs=0, echo=True)
    assert [choice.text for choice in several.choices] == ["a", "a", "bcd", "bcd"]
    assert [choice.finish_reason for choice in several.choices] == ["length"] * 4
    assert several.choices[3].logprobs.token_logprobs == [None, -1 / 8, -2 / 8]
    assert several.choices[0].logprobs.token_logprobs == [None]
    assert several.usage.completion_tokens == 0
    assert max(len(decision.new) for decision in hand.decisions[-4:]) == 0  # nothing was generated
    echoed = complete(client, prompt="ab", max_tokens=2, echo=True)
    assert (echoed.choices[0].text, echoed.choices[0].logprobs) == ("abhe", None)
    pieces = [piece.choices[0].text for piece in complete(client, prompt="ab", max_tokens=2, echo=True, stream=True)]
    assert pieces == ["abh", "e"]


def test_chats_have_no_logprobs_and_no_echo(make, tmp_path):
    _, client = make(FolderTokenizer(save_tokenizer(tmp_path, template=TEMPLATE)), starts=False)
    for field in ("logprobs", "echo"):
        with pytest.raises(openai.BadRequestError, match=f"{field} is not supported by this server"):
            client.chat.completions.create(
                model="hand", messages=[{"role": "user", "content": "hi"}], extra_body={field: True}
            )


def test_an_answer_that_ends_with_an_end_of_text_token_has_its_logprob(make, tmp_path):
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path))
    hand, client = make(tokenizer)
    hand.says = [*tokenizer.encode("return x"), tokenizer.ends[0]]
    answer = complete(client, prompt="def number", max_tokens=13, logprobs=0).choices[0]
    assert (answer.text, answer.finish_reason) == ("return x", "stop")
    assert "".join(answer.logprobs.tokens) == "return x"
    assert len(answer.logprobs.token_logprobs) == len(hand.says)


def test_chats_go_through_the_template_and_end_where_the_tokenizer_says(make, tmp_path):
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path, template=TEMPLATE))
    hand, client = make(tokenizer)
    hand.says = [*tokenizer.encode(SAID), tokenizer.ends[0]]
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(model="hand", messages=messages)
    assert whole.choices[0].message.content == SAID
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    given = next(decision.new[0] for decision in hand.decisions if decision.new)
    assert tokenizer.hf_tokenizer.decode(given.prompt) == "<|user|>hi<end>\n<|assistant|>"
    assert given.max_new_tokens == POSITIONS - len(given.prompt) + 1
    assert given.sampling.temperature == 1
    again = {**whole.choices[0].message.model_dump(), "content": "a"}  # its other fields are null
    deltas = [piece.choices[0].delta for piece in client.chat.completions.create(
        model="hand", messages=[*messages, again], max_completion_tokens=24, stream=True, seed=5, top_p=0.5
    )]  # fmt: skip
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == SAID
    given = [decision.new[0] for decision in hand.decisions if decision.new][-1]
    assert (given.seed, given.sampling.top_p, given.max_new_tokens) == (5, 0.5, 24)
    options = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
    assert (
        client.chat.completions.create(model="hand", messages=messages, **options).choices[0].finish_reason == "length"
    )


def test_a_tokenizer_without_a_template_is_told_for_chats(make, tmp_path):
    for tokenizer, message in [
        (FolderTokenizer(save_tokenizer(tmp_path)), r"no chat template, .* --chat-template FILE"),
        (ByteTokenizer(), "the model's tokens are bytes"),
    ]:
        _, client = make(tokenizer)
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(model="hand", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "no model gpt here: this server has hand"),
        ({"best_of": 2}, openai.BadRequestError, "best_of is not supported"),
        ({"n": 3, "prompt": ["a", "b"]}, openai.BadRequestError, r"6 answers are asked for \(prompts: 2, n=3\)"),
        ({"prompt": [1, 2.5]}, openai.BadRequestError, "prompt: expected a text, a list of token ids"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs: Input should be less than or equal to 20"),
        ({"logprobs": 1, "stream": True}, openai.BadRequestError, "logprobs come with an answer as a whole: leave str"),
        ({"logprobs": 1, "stop": "a"}, openai.BadRequestError, "logprobs come with an answer as a whole: leave stop"),
        ({"max_tokens": 0, "logprobs": 1}, openai.BadRequestError, "max_tokens=0 asks for no text: set echo and logpr"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty is not supported"),
        ({"extra_body": {"beams": 3}}, openai.BadRequestError, "beams: there is no such field"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens: Input should be greater"),
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1.0: expected 0 or more"),
        ({"temperature": 1, "top_p": 2}, openai.BadRequestError, "top_p=2.0: expected above 0"),
        ({"prompt": ""}, openai.BadRequestError, "prompt 0 is empty"),
        ({"prompt": [1, 300]}, openai.BadRequestError, "token 1 is 300, the model knows 0 to 299"),
        ({"prompt": "x" * 65}, openai.BadRequestError, "prompt 0 has 65 tokens, and there are 64 positions"),
        ({"max_tokens": 65}, openai.BadRequestError, "Set max_tokens to 64 or less"),
        ({"stop": ["", "a"]}, openai.BadRequestError, "expected at most 4 strings, none of them empty"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(make, given, kind, message):
    hand, client = make(starts=False)
    with pytest.raises(kind, match=message) as caught:
        complete(client, **given)
    assert caught.value.body["type"] == "invalid_request_error"
    if "temperature" in given:
        assert caught.value.body["param"] == [*given][-1]  # the field of the draws
    assert not len(hand.queue)


def test_values_that_ask_for_nothing_are_no_reason_to_refuse(make):
    _, client = make()
    given = {"n": 1, "echo": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "a"}
    given["extra_body"] = {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "beams": None}
    assert complete(client, **given, top_p=0.5).choices[0].text == SAID


def test_a_full_queue_says_when_to_come_again_and_an_ending_server_that_it_ends(make):
    hand, client = make(starts=False, max_waiting=1)
    with client.completions.create(model="hand", prompt="x", max_tokens=2, temperature=0, stream=True) as stream:
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.body["code"] == "queue_full"
        hand.queue.close()
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
        assert hand.request("GET", "/health")[1] == {"status": "stopping", "running": 0, "waiting": 1}
        hand.start()
        assert "".join(piece.choices[0].text for piece in stream) == SAID[:2]  # what had been taken is answered


def test_a_client_that_leaves_frees_its_place(make):
    hand, client = make(starts=False)
    with complete(client, stream=True, max_tokens=POSITIONS) as stream:
        (entry,) = hand.turn().new
        hand.turn()
        next(iter(stream))
    (request,) = hand.scheduler._batches[0].values()
    assert soon(lambda: request.is_cancelled)
    assert hand.turn().removed == [entry.number]
    assert not hand.scheduler.num_running
    with pytest.raises(openai.APITimeoutError):
        complete(client, timeout=1.0)
    assert len(hand.queue) == 1
    assert soon(lambda: hand.queue._waiting[0].is_cancelled)
    assert not hand.turn().new
    assert not len(hand.queue)


def test_answers_under_way_are_told_when_the_model_fails(make):
    hand, client = make(starts=False)
    with complete(client, stream=True) as stream:
        for _ in range(3):
            hand.turn()
        hand.scheduler.fail("a process of the model has failed")
        with pytest.raises(openai.APIError, match="a process of the model has failed"):
            list(stream)


def test_paths_and_bodies_that_are_none_of_ours_get_errors_of_openai_s_form(make):
    hand, client = make(starts=False)
    assert [model.id for model in client.models.list()] == ["hand"]
    assert client.models.retrieve("hand").created == 7
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    path = "/v1/completions"
    for method, where, body, headers, status, message in [
        ("GET", "/v1/files", None, {}, 404, "GET /v1/files: Not Found"),
        ("GET", path, None, {}, 405, "Method Not Allowed"),
        ("POST", path, "{", {}, 400, "the body is not JSON"),
        ("POST", path, "[" * 100_000, {}, 400, "the body is not JSON"),
        ("POST", path, '{"model": "hand", "prompt": "\\ud800"}', {}, 400, "surrogates not allowed"),
        ("POST", path, "[]", {}, 400, "the body is list, expected a JSON object"),
        ("POST", path, "{}", {}, 400, "model: Field required"),
        ("POST", path, "{}", {"Content-Type": "text/plain"}, 415, "the content type is not application/json"),
        ("POST", path, b"1" * (MOST_BYTES + 1), {}, 413, "more than 4,194,304 bytes"),
    ]:
        answer, told = hand.request(method, where, body, **headers)
        assert answer.status == status, where
        assert message in told["error"]["message"]
    answer, _ = hand.request("GET", "/health", Host="rebound.example")  # a page of a browser, by a name of its own
    assert answer.status == 400


def test_a_port_that_another_program_has_begun_to_listen_on_since_is_refused():
    with bind("127.0.0.1", 0) as ours, bind(*ours.getsockname()) as other:
        other.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            _serve_http(None, ours, 1).__enter__()


def test_a_key_is_asked_for_where_there_is_one(make):
    hand, client = make(api_key="a secret")
    assert complete(client).choices[0].text == SAID
    with openai.OpenAI(base_url=client.base_url, api_key="another", max_retries=0) as other:
        for call in (other.models.list, lambda: complete(other)):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                call()
    assert hand.request("GET", "/health")[0].status == 200


@pytest.mark.parametrize("as_sent", ["utf-8", "latin-1"])
def test_a_key_may_have_letters_of_any_language(make, as_sent):
    hand, _ = make(api_key="ein Schlüssel")
    for key, status in (("ein Schlüssel", 200), ("ein Schluessel", 401), ("ein Schl\xfcssel\xff", 401)):
        assert hand.request("GET", "/v1/models", Authorization=f"Bearer {key}".encode(as_sent))[0].status == status
    hand, _ = make(api_key="ключ")
    assert hand.request("GET", "/v1/models")[0].status == 401
    assert hand.request("GET", "/v1/models", Authorization="Bearer ключ".encode())[0].status == 200


class Slow(ByteTokenizer):
    """Counts what it is given, and takes long texts when it is allowed to."""

    def __init__(self):
        self.num_given, self.may_go_on = 0, threading.Event()

    def encode(self, text):
        if len(text) > POSITIONS:
            assert self.may_go_on.wait(20)
        self.num_given += len(text)
        return super().encode(text)


def test_a_text_that_cannot_fit_is_refused_by_its_beginning(make, tmp_path):
    """The 4 MB of a body take seconds of a processor: so much text is read as shows that it has too many tokens."""
    tokenizer = Slow()
    tokenizer.may_go_on.set()
    _, client = make(tokenizer)
    for prompt in ("x" * 4_000_000, ["x", "y" * 4_000_000]):
        with pytest.raises(openai.BadRequestError, match="tokens, and there are 64 positions") as caught:
            complete(client, prompt=prompt)
        assert caught.value.body["code"] == "context_length_exceeded"
        assert caught.value.body["param"] == "prompt"
    assert tokenizer.num_given < 2000
    assert complete(client, prompt="x" * POSITIONS, max_tokens=1).choices[0].text == SAID[0]  # 64 fit
    folder = FolderTokenizer(save_tokenizer(tmp_path, template=TEMPLATE))
    given, encode = [], folder.encode_pieces
    folder.encode_pieces = lambda texts: given.extend(texts) or encode(texts)
    _, client = make(folder)
    messages = [{"role": "user", "content": "so many words " * 10} for _ in range(10_000)]
    with pytest.raises(openai.BadRequestError, match="tokens, and there are 64 positions"):
        client.chat.completions.create(model="hand", messages=messages)
    assert sum(map(len, given)) < 4000


def test_short_requests_do_not_wait_until_long_ones_have_become_tokens(make):
    tokenizer = Slow()
    hand, client = make(tokenizer)
    long = json.dumps({"model": "hand", "prompt": "x" * 100_000, "max_tokens": 1})
    told = []
    threads = [
        threading.Thread(target=lambda: told.append(hand.request("POST", "/v1/completions", long)[0].status))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert complete(client, timeout=10).choices[0].text == SAID
    assert told == []
    tokenizer.may_go_on.set()
    for thread in threads:
        thread.join()
    assert told == [400] * 4


@contextlib.contextmanager
def connected(hand, *pieces):
    with socket.create_connection(("127.0.0.1", hand.port), timeout=10) as held:
        for piece in pieces:
            held.sendall(piece)
            time.sleep(0.05)
        yield held


def ends(held):
    """What the server says until it ends the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := held.recv(1000):
            said += piece
    return said


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"


def test_a_request_that_does_not_come_to_its_end_is_cut_off_without_a_traceback(make, monkeypatch, capfd):
    hand, client = make(starts=False)
    monkeypatch.setattr("shardwise.serve.server._REQUEST_S", 0.6)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    behind = [whole + HEAD + b"\r\n"]  # in one packet
    cut = ([], [HEAD], [HEAD, b"\r\n", b'{"'], [whole, b"GET /hea"], [b"GET /v1/files HTTP/1.1\r\n"], behind)
    for pieces in cut:
        with connected(hand, *pieces) as held:
            begun = time.monotonic()
            said = ends(held)
            assert 0.2 < time.monotonic() - begun < 8, pieces
            assert said.count(b"200 OK") == b"".join(pieces).count(whole)
    with connected(hand, HEAD, b"\r\n", b'{"'):  # it leaves by itself
        pass
    with complete(client, stream=True, max_tokens=2) as stream:  # an answer may take longer
        time.sleep(0.8)
        hand.start()
        assert "".join(piece.choices[0].text for piece in stream) == SAID[:2]
    assert capfd.readouterr().err == ""


def test_more_connections_than_are_taken_get_503_or_are_ended(make):
    hand, client = make(most_connections=4)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connected(hand))
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client)
        assert caught.value.status_code == 503
        stack.callback(client.close)
        for _ in range(5):
            stack.enter_context(connected(hand))
        with connected(hand) as last:
            assert ends(last) == b""
    assert soon(lambda: hand.request("GET", "/health")[0].status == 200)
