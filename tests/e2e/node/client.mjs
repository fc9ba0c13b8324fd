// The official npm client against a server: node client.mjs URL. Prints JSON of what it saw.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "tiny";
const messages = [{ role: "user", content: "Hi" }];
const schema = {
  type: "object",
  properties: { answer: { enum: ["yes", "no"] } },
  required: ["answer"],
  additionalProperties: false,
};
const parameters = { type: "object", properties: {}, additionalProperties: false };
const tool = {
  type: "function",
  function: { name: "weather", parameters },
};
const seen = {};

const runner = client.chat.completions
  .stream({ model, messages, max_tokens: 5, stream_options: { include_usage: true } });
const streamed = await runner.finalChatCompletion();
seen.streamed = streamed.choices[0].finish_reason;
seen.usage = streamed.usage.completion_tokens;

const plain = await client.chat.completions.create({
  model, messages, max_tokens: 5, seed: 1, logprobs: true,
});
seen.logprobs = plain.choices[0].logprobs.content.length;

const json = await client.chat.completions.create({
  model, messages,
  response_format: { type: "json_schema", json_schema: { name: "n", strict: true, schema } },
});
seen.json = JSON.parse(json.choices[0].message.content).answer;

const calls = client.chat.completions.stream({
  model, messages, tools: [tool], tool_choice: "required",
});
const [call] = (await calls.finalChatCompletion()).choices[0].message.tool_calls;
seen.call = [call.type, call.function.name, JSON.parse(call.function.arguments)];

const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
seen.vectors = vectors.data.map((item) => item.embedding.length);

const response = await client.responses.create({ model, input: "Hi", max_output_tokens: 5 });
seen.response = response.status;
const events = [];
for await (const event of await client.responses.create({
  model, input: "Hi", max_output_tokens: 5, stream: true, previous_response_id: response.id,
})) {
  events.push(event.type);
}
seen.events = [events[0], events.at(-1)];

try {
  await client.chat.completions.create({ model: "other", messages });
} catch (error) {
  seen.error = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify(seen));
