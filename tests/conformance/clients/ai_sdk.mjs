// The AI SDK against the server: `node ai_sdk.mjs FEATURE API URL`; exits with 1 and a stack trace unless it works.
// API is openai (responses), openai-chat, compatible or anthropic. URL is the server's base URL without /v1.

import assert from 'node:assert/strict';
import dns from 'node:dns';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

// No client may call any other machine.
dns.lookup = (host, ...rest) => {
  const answer = rest.at(-1);
  if (host !== 'localhost') return answer(new Error(`a client called ${host}`));
  return answer(null, typeof rest[0] === 'object' && rest[0].all ? [{ address: '127.0.0.1', family: 4 }] : '127.0.0.1', 4);
};

const require = createRequire(join(process.env.CONFORMANCE_NPM, 'package.json'));
const load = name => import(pathToFileURL(require.resolve(name)));
const { generateObject, generateText, embed, Output, stepCountIs, streamObject, streamText, tool } = await load('ai');
const { z } = await load('zod');
const [feature, api, base] = process.argv.slice(2);
const scenario = JSON.parse(process.env.CONFORMANCE_SCENARIO);
globalThis.AI_SDK_LOG_WARNINGS = false;

async function provider() {
  const options = { apiKey: 'none', baseURL: `${base}/v1` };
  if (api === 'anthropic') return (await load('@ai-sdk/anthropic')).createAnthropic(options);
  if (api === 'compatible') {
    const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
    return createOpenAICompatible({ ...options, name: 'tandem', includeUsage: true, supportsStructuredOutputs: true });
  }
  return (await load('@ai-sdk/openai')).createOpenAI(options);
}

const made = await provider();
const model = api === 'openai-chat' ? made.chat(scenario.model) : made(scenario.model);
const common = { model, maxRetries: 0, maxOutputTokens: 400, temperature: 0 };
const weather = tool({
  description: 'Get the weather of a city',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    assert.equal(city, 'Oslo');
    return scenario.weather_result;
  },
});
const person = z.object({
  name: z.string().max(12),
  age: z.number().int().min(0).max(150),
  size: z.enum(['small', 'medium', 'large']),
});
const unlooped = { ...common, tools: { get_weather: tool({ ...weather, execute: undefined }) } };
const question = { ...unlooped, prompt: scenario.weather_question };

function right(calls) {
  assert.deepEqual(calls.map(call => [call.toolName, call.input]), [['get_weather', { city: 'Oslo' }]]);
}

async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const features = {
  async generateText() {
    const result = await generateText({ ...common, system: 'Be short.', prompt: scenario.greeting });
    assert.ok(result.text);
    assert.equal(result.finishReason, 'stop');
    assert.ok(result.usage.outputTokens > 0);
  },
  async messages() {
    const messages = [
      { role: 'user', content: scenario.greeting },
      { role: 'assistant', content: 'Hello!' },
      { role: 'user', content: [{ type: 'text', text: 'What is 2 + 3?' }] },
    ];
    assert.match((await generateText({ ...common, messages })).text, /5/);
  },
  async streamText() {
    const result = streamText({ ...common, prompt: scenario.greeting, onError: ({ error }) => { throw error; } });
    const parts = await collected(result.textStream);
    assert.ok(parts.length > 2);
    assert.equal(parts.join(''), (await generateText({ ...common, prompt: scenario.greeting })).text);
    assert.ok((await result.usage).outputTokens > 0);
  },
  async tools() {
    const result = await generateText({ ...question, toolChoice: 'auto' });
    right(result.toolCalls);
    assert.equal(result.finishReason, 'tool-calls');
  },
  async toolRequired() {
    right((await generateText({ ...question, toolChoice: 'required' })).toolCalls);
  },
  async toolNamed() {
    right((await generateText({ ...question, toolChoice: { type: 'tool', toolName: 'get_weather' } })).toolCalls);
  },
  async toolNone() {
    const result = await generateText({ ...question, toolChoice: 'none' });
    assert.ok(result.text && !result.toolCalls.length);
  },
  async toolLoop() {
    const tools = { get_weather: weather };
    const result = await generateText({ ...common, tools, prompt: scenario.weather_question, stopWhen: stepCountIs(4) });
    assert.equal(result.text, scenario.weather_answer);
  },
  async streamTools() {
    const tools = { get_weather: weather };
    const fields = { ...common, tools, prompt: scenario.weather_question, stopWhen: stepCountIs(4) };
    const result = streamText({ ...fields, onError: ({ error }) => { throw error; } });
    const kinds = new Set((await collected(result.fullStream)).map(part => part.type));
    assert.ok(kinds.has('tool-input-start') && kinds.has('tool-call') && kinds.has('tool-result'), [...kinds].join());
    assert.equal((await result.steps).at(-1).text, scenario.weather_answer);
  },
  async generateObject() {
    const { object } = await generateObject({ ...common, schema: person, prompt: scenario.person_question });
    person.parse(object);
  },
  async streamObject() {
    const fields = { ...common, schema: person, prompt: scenario.person_question };
    const result = streamObject({ ...fields, onError: ({ error }) => { throw error; } });
    assert.ok((await collected(result.partialObjectStream)).length > 1);
    person.parse(await result.object);
  },
  async outputObject() {
    const fields = { ...common, output: Output.object({ schema: person }), prompt: scenario.person_question };
    person.parse((await generateText(fields)).output);
  },
  async outputChoice() {
    const options = ['small', 'large'];
    const fields = { ...common, output: Output.choice({ options }), prompt: scenario.person_question };
    assert.ok(options.includes((await generateText(fields)).output));
  },
  async settings() {
    const fields = { ...common, temperature: 0.8, topP: 0.9, seed: 3, stopSequences: ['zzz'], maxOutputTokens: 8 };
    assert.equal((await generateText({ ...fields, prompt: 'Tell me a story.' })).finishReason, 'length');
  },
  async image() {
    const content = [{ type: 'image', image: new Uint8Array([137, 80, 78, 71]), mediaType: 'image/png' }];
    await generateText({ ...common, messages: [{ role: 'user', content }] });
  },
  async embed() {
    const embedding = made.textEmbeddingModel ?? made.embeddingModel;
    await embed({ model: embedding.call(made, scenario.model), value: scenario.greeting, maxRetries: 0 });
  },
};

await features[feature]();
