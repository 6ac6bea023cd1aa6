import { useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { endName, seconds, signed, type Call, type Episode, type Index, type Message, type Turn } from "./data";

interface Piece {
  kind: "text" | "thought" | "call";
  text: string;
  call?: Call;
}

// Splits an action into what is thought, what is called and the rest.
export function pieces(action: string, calls: Call[]): Piece[] {
  const found: Piece[] = [];
  let at = 0;
  let number = 0;
  const marks = /<think>([\s\S]*?)(?:<\/think>|$)|<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/g;
  for (const match of action.matchAll(marks)) {
    if (match.index > at) found.push({ kind: "text", text: action.slice(at, match.index) });
    if (match[1] !== undefined) found.push({ kind: "thought", text: match[1] });
    else found.push({ kind: "call", text: match[2], call: calls[number++] });
    at = match.index + match[0].length;
  }
  if (at < action.length) found.push({ kind: "text", text: action.slice(at) });
  // calls in the format of another family of models stay in the text
  for (const call of calls.slice(number)) found.push({ kind: "call", text: "", call });
  return found.filter((piece) => piece.kind !== "text" || piece.text.trim());
}

const line = (text: string, most = 90) => {
  const flat = text.replace(/\s+/g, " ").trim();
  return flat.length > most ? `${flat.slice(0, most)}…` : flat || "(nothing)";
};

function Fold({ title, preview, open, children }: { title: string; preview?: string; open: boolean; children: ComponentChildren }) {
  return (
    <details class="fold" open={open}>
      <summary>
        <b>{title}</b> <span>{preview}</span>
      </summary>
      {children}
    </details>
  );
}

function CallView({ call, text, open }: { call?: Call; text: string; open: boolean }) {
  if (!call || call.error) {
    return (
      <Fold title="malformed tool call" preview={call?.error ?? line(text)} open={open}>
        <pre>{text}</pre>
      </Fold>
    );
  }
  const told = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments);
  return (
    <Fold title={`calls ${call.name}`} preview={line(told)} open={open}>
      <pre>{JSON.stringify(call.arguments, null, 2)}</pre>
    </Fold>
  );
}

function Bubble({ role, name, children }: { role: string; name?: string | null; children: ComponentChildren }) {
  return (
    <div class={`bubble ${role}`}>
      <div class="role">{role}{name ? `, ${name}` : ""}</div>
      {children}
    </div>
  );
}

function Earlier({ message, open }: { message: Message; open: boolean }) {
  const text = message.content ?? "";
  const calls = message.tool_calls ?? [];
  const fold = message.role === "system" || message.role === "tool" || text.length > 400;
  return (
    <Bubble role={message.role} name={message.name}>
      {message.reasoning && <Fold title="thinks" preview={line(message.reasoning)} open={open}><pre>{message.reasoning}</pre></Fold>}
      {fold ? <Fold title={message.role === "system" ? "system prompt" : "message"} preview={line(text)} open={open}><pre>{text}</pre></Fold> : text && <pre>{text}</pre>}
      {calls.map((call, i) => <CallView key={i} call={call} text="" open={open} />)}
    </Bubble>
  );
}

export function Action({ turn, open }: { turn: Turn; open: boolean }) {
  const parts = pieces(turn.action, turn.calls);
  return (
    <>
      {parts.map((piece, i) =>
        piece.kind === "text" ? (
          <pre key={i}>{piece.text.trim()}</pre>
        ) : piece.kind === "thought" ? (
          <Fold key={i} title="thinks" preview={line(piece.text)} open={open}><pre>{piece.text.trim()}</pre></Fold>
        ) : (
          <CallView key={i} call={piece.call} text={piece.text} open={open} />
        ),
      )}
      {parts.length === 0 && <pre class="soft">(nothing)</pre>}
    </>
  );
}

export function Observation({ role, text, open }: { role: string; text: string; open: boolean }) {
  if (role !== "tool" && text.length <= 600) return <pre>{text || "(nothing)"}</pre>;
  return (
    <Fold title={role === "tool" ? "result" : "message"} preview={line(text)} open={open}>
      <pre>{text}</pre>
    </Fold>
  );
}

export function Reward({ value }: { value: number }) {
  const kind = value > 0 ? "good" : value < 0 ? "bad" : "none";
  return <span class={`reward ${kind}`}>reward {signed(value)}</span>;
}

const reasons: Record<string, string> = {
  template: "The chat template renders earlier turns otherwise than they were sampled.",
  edited: "The conversation was edited.",
  compacted: "The conversation was replaced by a shorter one.",
  new: "It is another conversation.",
};

function mean(values: (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

export function Conversation({ index, episode }: { index: Index; episode: Episode }) {
  const [open, setOpen] = useState(false);
  const e = index.episodes;
  const { row, turns } = episode;
  const last = turns[turns.length - 1];
  const kept = index.texts.phase[e.phase[row]] === "train" && index.batches.includes(e.step[row]);
  return (
    <div class="conversation" key={String(open)}>
      <button type="button" class="small" onClick={() => setOpen(!open)} aria-pressed={open}>{open ? "Fold all" : "Unfold all"}</button>
      {turns.map((turn, k) => {
        const advantage = mean(turn.values.advantages);
        const fresh = turn.parent === null && k > 0;
        // messages that a user's or a tool's one ends are the whole conversation
        const whole = turn.messages !== null && (k > 0 || ["user", "tool"].includes(turn.messages.at(-1)?.role ?? ""));
        const forked = turn.parent !== null && turn.parent !== k - 1;
        return (
          <article key={k} aria-label={`Turn ${k + 1}`}>
            <div class="line">
              <h3>Turn {k + 1}{turn.agent ? ` of ${turn.agent}` : ""}</h3>
              <Reward value={turn.reward} />
              {advantage !== null && <span class={`reward ${advantage > 0 ? "good" : advantage < 0 ? "bad" : "none"}`}>advantage {signed(advantage)}</span>}
              {turn.parts && Object.entries(turn.parts).map(([name, value]) => <span key={name} class="part">{name} {signed(value)}</span>)}
              {kept && <code title="Plays on from this turn">gspo-env rewind {index.run.name} --step {e.step[row]} --episode {e.group[row]}-{e.member[row]} --turn {k + 1}</code>}
              <small>{turn.action_ids.length} tokens, {seconds(turn.generate_seconds)}; environment {seconds(turn.step_seconds)}</small>
            </div>
            {(fresh || forked) && <p class="fork">{fresh ? "A new token sequence begins here." : `Continues turn ${turn.parent! + 1}: the sequence forks.`}{turn.fork && ` ${reasons[turn.fork] ?? turn.fork}`}</p>}
            {turn.messages && k > 0 ? (
              <Fold title={`the whole conversation, given anew (${turn.messages.length} messages)`} open={open}>
                {turn.messages.map((message, i) => <Earlier key={i} message={message} open={open} />)}
              </Fold>
            ) : (
              turn.messages?.map((message, i) => <Earlier key={i} message={message} open={open} />)
            )}
            {turn.tools && (
              <Fold title={`${turn.tools.length} tool${turn.tools.length === 1 ? "" : "s"}`} preview={turn.tools.map((tool: any) => tool?.function?.name ?? "").join(", ")} open={open}>
                <pre>{JSON.stringify(turn.tools, null, 2)}</pre>
              </Fold>
            )}
            {!whole && (
              <Bubble role={turn.role}>
                <Observation role={turn.role} text={turn.observation} open={open} />
              </Bubble>
            )}
            <Bubble role="assistant">
              <Action turn={turn} open={open} />
            </Bubble>
          </article>
        );
      })}
      {!turns.length && <p class="empty">The episode ended before its first turn.</p>}
      {episode.final && <Bubble role={last?.calls.length ? "tool" : "user"} name="after the last action"><pre>{episode.final}</pre></Bubble>}
      {episode.error && <details class="warning" open><summary>The environment failed</summary><pre>{episode.error}</pre></details>}
      <p class="end">
        <b class={e.success[row] ? "won" : "lost"}>{e.success[row] === null ? "No verdict" : e.success[row] ? "Success" : "No success"}</b>: outcome {signed(e.outcome[row])}, return {signed(e.total_reward[row])}, ended by {endName(index.texts.stop_reason[e.stop_reason[row]])}
      </p>
    </div>
  );
}
