"""Official clients against a server: streams, tools, JSON by schema, embeddings, responses."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

NODE = Path(__file__).parent / "node"
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": EMPTY},
}


class Verdict(pydantic.BaseModel):
    """What the client makes of JSON by schema."""

    is_good: bool


@pytest.fixture(scope="module")
def client(tiny_url):
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_chat_streams(client):
    options = {"include_usage": True}
    chat = client.chat.completions
    with chat.stream(
        model="tiny", messages=MESSAGES, max_tokens=5, seed=1, stream_options=options
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.current_completion_snapshot  # the final one must not be cut by length
    assert "".join(deltas) == final.choices[0].message.content
    assert final.usage.completion_tokens <= 5
    whole = chat.create(model="tiny", messages=MESSAGES, max_tokens=5, seed=1, logprobs=True)
    assert whole.choices[0].message.content == final.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_json_by_schema_is_parsed(client):
    parsed = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed.is_good, bool)
    response = client.responses.parse(model="tiny", input="Hi", text_format=Verdict)
    assert isinstance(response.output_parsed.is_good, bool)


def test_calls_are_found_whole_and_streamed(client):
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "model": "tiny"}
    chat = client.chat.completions
    whole = chat.create(messages=MESSAGES, **fields).choices[0].message.tool_calls
    with chat.stream(messages=MESSAGES, **fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    for call in (whole[0], streamed[0]):
        assert (call.type, call.function.name) == ("function", "weather")
        assert isinstance(json.loads(call.function.arguments), dict)


def test_completions_stream_and_errors_have_their_class(client):
    chunks = client.completions.create(model="tiny", prompt="Hi", max_tokens=4, stream=True)
    assert [chunk.object for chunk in chunks]
    with pytest.raises(openai.NotFoundError, match="does not exist") as refused:
        client.completions.create(model="other", prompt="Hi")
    assert refused.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="Hi", temperature=9)


def test_embeddings_come_in_both_encodings(client):
    packed = client.embeddings.create(model="tiny", input=["a", "b"])  # asks for base64 by itself
    spelt = client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
    for one, other in zip(packed.data, spelt.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)


def test_responses_go_on_stream_and_are_deleted(client):
    first = client.responses.create(model="tiny", input="Hi", max_output_tokens=5)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    with client.responses.create(
        model="tiny",
        input="More",
        previous_response_id=first.id,
        stream=True,
        text={"format": form},
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert json.loads(events[-1].response.output_text)["answer"] in ("yes", "no")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(first.id)


def test_the_official_npm_client(tiny_url):
    if shutil.which("npm") is None:
        pytest.skip("missing tool: npm")
    if not (NODE / "node_modules" / "openai").exists():
        install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(install, cwd=NODE, check=True, timeout=240)
    done = subprocess.run(
        ["node", "client.mjs", tiny_url], cwd=NODE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("json") in ("yes", "no")
    assert seen == {
        "streamed": "length",
        "usage": 5,
        "logprobs": 5,
        "call": ["function", "weather", {}],
        "vectors": [64, 64],
        "response": "incomplete",
        "events": ["response.created", "response.incomplete"],
        "error": ["NotFoundError", 404, "model"],
    }
