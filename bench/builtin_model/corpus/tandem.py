# ruff: noqa: E501 (tables of sentences read best on long lines)
"""Questions about Tandem itself, with correct answers, so that a demo can explain what is happening."""

from __future__ import annotations

from random import Random

from bench.builtin_model.corpus.items import Item
from bench.builtin_model.corpus.phrases import exchange, intents

_OPENING = (
    "{Hey,|So,|Tell me,|Please explain:|I wonder,|A question:|I am new here.|Hi!|Hello!|I read the docs.|Can you tell me:|Quick question:|Okay.|One more thing:"
    "|For my notes:|In short,|About Tandem:|Please,|My colleague asks:}"
)
_INTENTS = intents(
    """
    {What is|What's|Explain|Tell me about|Describe|What do you mean by} Tandem{?| please.| to me.}
    {What is this|What is this server|What am I using|Which server is this|What is this software|What software do you run on|What serves you}?
    {What does|What can} Tandem {do|do for me}?
    = Tandem is *a server for language models with separate pools* of workers for prefill and decode.

    {What does|What is the job of|Explain|What is|Describe|What work does|Tell me about} {a|the} prefill worker{ do| for| doing| in Tandem| here|}{?|}
    {What happens on|What is done by|What runs on} {a|the} prefill worker?
    = A prefill worker *reads the whole prompt at once, builds its KV cache* and samples the first token.

    {What does|What is the job of|Explain|What is|Describe|What work does|Tell me about} {a|the} decode worker{ do| for| doing| in Tandem| here|}{?|}
    {What happens on|What is done by|What runs on} {a|the} decode worker?
    = A decode worker *takes over the KV cache and makes the answer token by token*, many requests in one batch.

    {What is|What's|Explain|What does one mean by|Tell me about|Describe} {prefill|the prefill phase|prefilling}{?| please.| to me.| in simple words.}
    {What happens in|What is done in} {prefill|the prefill phase}?
    = Prefill is *the first phase: the whole prompt is computed* in parallel. It needs much compute.

    {What is|What's|Explain|What does one mean by|Tell me about|Describe} {decode|the decode phase|decoding}{?| please.| to me.| in simple words.}
    {What happens in|What is done in} {decode|the decode phase}?
    = Decode is *the second phase: one token after another*. It needs much memory bandwidth.

    {What is|What's|Explain|Tell me about|Describe|What do you mean by} {the|a} {KV cache|key value cache|KV}{?| please.| to me.| in simple words.}
    {What is|What's} {stored|kept} in the KV cache?
    {Why do we need|What good is} {the|a} KV cache?
    = The KV cache *holds the keys and values of all earlier tokens*, so that they are not computed again.

    {Why|For what reason} {two pools|separate pools|are there two pools|two kinds of workers|are there two kinds of workers|do you split prefill and decode|separate prefill and decode|split the phases}{?| in Tandem?}
    {What is the use|What is the advantage|What good is it|What is the point} of {two pools|separate pools|splitting prefill and decode|disaggregation}?
    {What is|What's|Explain} {disaggregation|disaggregated serving|disaggregated prefill}{?| please.}
    = *A long prompt then does not slow down the answers of others*, and each pool can grow on its own.

    {What is|What does|Explain|Describe|Tell me about|What is the job of} {a|the} coordinator{ do| for| doing| in Tandem| here|}{?|}
    {What happens on|What is done by} the coordinator?
    = The coordinator *speaks HTTP, owns the text and chooses a prefill and a decode worker* for each request.

    {What is|What's|Explain|Describe|Tell me about|What do you mean by} {a|the} {hand-off|handoff|hand-over|KV transfer|KV hand-off}{?| please.| to me.| in Tandem?}
    {How does|How do} the {KV cache|keys and values|KV blocks} {travel|move|get} {to decode|from prefill to decode|to the decode worker}?
    = In a hand-off *the prefill worker sends its KV blocks to the decode worker*, which checks them and goes on.

    {How do I|How can I|How to|Tell me how to} {add|start|join|attach} {a|another|one more|a new} decode worker{?| to a running system?| please?}
    {I need|I want} {more decode workers|another decode worker|more decoding}. {How|What do I do}?
    = *Run tandem decode with the model and --coordinator*, and it joins by itself.

    {How do I|How can I|How to|Tell me how to} {add|start|join|attach} {a|another|one more|a new} prefill worker{?| to a running system?| please?}
    {I need|I want} {more prefill workers|another prefill worker|more prefill}. {How|What do I do}?
    = *Run tandem prefill with the model and --coordinator*, and it joins by itself.

    {How do I|How can I|How to|Tell me how to} {start Tandem|start the server|start it|run Tandem|begin|get started|serve a model|launch Tandem}{?| quickly?| please?| here?}
    = *Type make up, or tandem up* with the name of a model.

    {How do I|How can I|How to|Tell me how to} {stop Tandem|stop the server|stop it|end Tandem|shut it down|shut down the server}{?| cleanly?| please?}
    = *Press Ctrl-C once to drain*, and a second time to stop at once.

    {How do I|How can I|How to|Tell me how to} {serve another model|use another model|change the model|load a bigger model|use my own model|serve Qwen|use a larger model}{?| with Tandem?| please?}
    = *Give its name or directory: tandem up MODEL*.

    {How do I|How can I|How to} {run|start|set|get} {two|three|four|more} {decode|prefill} workers{ with tandem up| at the start| from the beginning|}?
    {Which flag sets|How do I set} the number of workers?
    = *Use the flags --prefill N and --decode M* of tandem up.

    {What is|What's|Explain|Describe|What do you mean by|Tell me about} {colocated|colocated mode|colocated serving|the colocated mode|a colocated worker}{?| please.| in Tandem?}
    {Can|Could} {one worker|a single worker} do {both|both phases|prefill and decode}?
    = In colocated mode *one worker does prefill and decode in the same batch*.

    {When should I|When do I|When would I} {not|better not} {use Tandem|use two pools|split prefill and decode|disaggregate}?
    {When is|Is there a case where} {colocated|colocated mode|one pool} {better|the better choice}?
    = *With short prompts or little load* one colocated worker is the better choice.

    {What is|What's|Explain|Describe|Tell me about|What do you mean by} {a|the} {KV block|block|block table|paged KV cache|paged cache|paging}{?| please.| in Tandem?| to me.}
    = *The KV cache is cut into blocks of equal size*, and a table says which blocks a request has.

    {What is|What's|Explain|Describe|Tell me about|What do you mean by} {prefix caching|the prefix cache|a prefix cache|prefix reuse}{?| please.| in Tandem?}
    {Why is|How come} {a second request|the same prompt|my second question} {faster|so fast}?
    = *The blocks of a prompt that was seen before are used again*, so only the new part is computed.

    {What is|What's|Explain|Describe|Tell me about|What do you mean by} {continuous batching|batching|a batch}{?| please.| in Tandem?}
    = *Requests join and leave the running batch at every step*, so that nobody waits for the slowest.

    {What is|What's|Explain|Describe|What do you mean by|Tell me about} {chunked prefill|prefill in chunks|a prefill chunk}{?| please.| in Tandem?}
    = *A long prompt is computed in pieces under a token budget*, so that others can go on between them.

    {What is|What's|Explain|Describe|What do you mean by|Tell me about} {TTFT|the time to first token|time to first token}{?| please.}
    {How long|What tells me how long} {until|do I wait for} the first token?
    = It is *the time from the request to the first token* of the answer.

    {What is|What's|Explain|Describe|What do you mean by|Tell me about} {ITL|the inter-token latency|inter-token latency|time per token}{?| please.}
    = It is *the time between two tokens* of one answer.

    {Where does|Who samples|Who makes|Where is|Which worker makes} the first token{ come from| made| sampled|}?
    {Which worker|Who} sends the first token?
    = *The prefill worker samples the first token* and it is streamed at once.

    {What happens|What if|What does Tandem do} {when|if} {a worker dies|a worker crashes|a decode worker dies|a prefill worker dies|a worker is lost|something breaks}{?| in the middle?}
    = *The request is tried again on another worker*, and no token is lost or repeated.

    {What happens|What does Tandem do} {when|if} {a client leaves|the client disconnects|I close the connection|I cancel a request|I stop reading}?
    = *The work is stopped everywhere and its blocks are freed*.

    {How does|How do|By what rule does} {the router|the coordinator|Tandem} {choose|pick|select|find} {a worker|workers|the workers|a prefill worker}?
    {What does|What is|Explain} the router{ do|}?
    = *It looks for few queued tokens, a cached prefix and free blocks*.

    {What happens|What does Tandem do} {when|if} {the pool is full|memory is full|there are no free blocks|the KV cache is full}?
    {What is|Explain} preemption?
    = *A request is parked, its blocks are given back*, and later it is computed again.

    {Which|What} {hardware|GPU|machine|computer} {do I need|does Tandem need|is needed|works}{?| to start?}
    {Do I need a GPU|Does Tandem run without a GPU|Does it run on a CPU|Can I use a CPU}{?| at all?}
    = *Tandem runs on CPUs and on NVIDIA GPUs*. To try it, two CPU cores are enough.

    {Which|What} models {work|can I use|does Tandem serve|are supported|can you serve}{?| with Tandem?| here?}
    = *Decoder-only models of transformers*, with weights in safetensors.

    {Which|What} {API|interface|protocol} {does Tandem speak|do you have|do you offer|is there|can I use}?
    {Is it|Is Tandem} {OpenAI compatible|compatible with OpenAI|like the OpenAI API}?
    {How do I|How can I} {call Tandem|talk to it from Python|use the API|send a request}?
    = *The OpenAI API over HTTP*: chat completions and completions.

    {Which|On which|What} port {does Tandem use|is it|do you listen on|is the server on|does the server have}{?| by default?}
    = *Port 8000*, if you do not set another one.

    {Where are|How do I see|Where can I find|How do I get} {the metrics|metrics|the statistics|the numbers}{?| of Tandem?| please?}
    = *Ask for /metrics on the same port*. It is made for Prometheus.

    {How do I|How can I|Where can I} {see|list|find|watch} {the workers|all workers|my workers|which workers run|the state of the workers}{?| please?}
    = *Ask for /admin/workers*. It lists each worker with its role and blocks.

    {How do|How does|In what way do} {the bytes|KV bytes|the blocks|the workers} {travel|talk|speak to each other|move}{?| between workers?| on one machine?}
    {Which|What} {links|transports|transfer paths} {are there|does Tandem have|do you know}?
    = *Through shared memory on one machine and ZeroMQ between machines*.

    {Why are you|How come you are|Why is this model} {so small|that small|so tiny|such a small model}?
    {How big|How large|How small} {are you|is this model|is the built-in model}?
    {How many parameters} {do you have|has this model}?
    = *I have about five million parameters*, so that I fit into the repository.

    {What is|What's|Explain|Describe|Tell me about} {the built-in model|the model inside|the default model}{?| for?| please.}
    {Which model|What model} {is this|do you use|is running|am I talking to}?
    = *The built-in model is a small Llama* that lets you try Tandem without a download.

    {What is|Explain|Describe|What do you mean by|Tell me about} {speculative decoding|a draft model|the draft model|the draft}{?| please.| in Tandem?}
    = *A small draft model guesses tokens and the large one checks them* in one step.

    {How does|How do|Explain how} {a token|my text|the prompt|a request} {become|get to|turn into|come to} {an answer|a reply|text}{?| in Tandem?}
    {What happens|Walk me through what happens} {to|with} {my request|a request|my prompt}{?| in Tandem?}
    = *The coordinator tokenizes it, a prefill worker computes the prompt*, and a decode worker writes the answer.

    {What is|What's|Explain|Describe|What do you mean by|Tell me about} {a token|tokens|tokenization|a tokenizer|the tokenizer}{?| please.| in simple words.}
    = A token is *a piece of text, a word or a part of one*. A model reads and writes tokens.

    {Which|What} licence {does Tandem have|is it under|do you have}?
    {Is|Is it true that} Tandem {free|open source|free software}?
    {What is the|Under what} {license|licence} {of Tandem|is Tandem|is this}?
    = *Tandem is under the Apache licence*, version 2.

    {Why|How come} {is it called Tandem|the name Tandem|are you called Tandem|Tandem}{?| and not something else?}
    {What does|Where does} the name {Tandem|} {mean|come from}?
    = *On a tandem two riders share the work*, as prefill and decode do.
    """
)


def draw(rng: Random) -> Item:
    """Draw an item of this skill."""
    return exchange(rng, "tandem", rng.choice(_INTENTS), _OPENING)
