// Reads the data of the page from its own elements.

export interface Call {
  name?: string;
  arguments?: unknown;
  error?: string;
}

export interface Message {
  role: string;
  content?: string;
  reasoning?: string;
  name?: string;
  tool_calls?: Call[];
}

export interface Turn {
  turn: number;
  parent: number | null;
  fork: string | null;
  sequence: number;
  role: string;
  observation: string;
  action: string;
  calls: Call[];
  reward: number;
  parts: Record<string, number> | null;
  messages: Message[] | null;
  tools: unknown[] | null;
  agent: string | null;
  state_key: string | null;
  weights_version: number;
  generate_seconds: number;
  step_seconds: number;
  prompt_ids: number[];
  action_ids: number[];
  values: Record<Measure, (number | null)[]>;
}

export type Measure =
  | "advantages"
  | "engine_logprobs"
  | "trainer_logprobs"
  | "difference"
  | "ratios"
  | "clipped"
  | "entropies"
  | "versions";

export interface Episode {
  row: number;
  error: string | null;
  final: string;
  turns: Turn[];
}

type Column = "phase" | "step" | "env" | "seed" | "options" | "task_key" | "num_turns" | "num_sequences" | "total_reward" | "outcome" | "success" | "stop_reason" | "trained" | "redacted" | "group" | "member" | "tokens" | "block";

export type Effect = Record<"norm" | "cosine" | "clipped" | "turned_tokens" | "turned_turns" | "best" | "worst" | "outcome", number | null>;

export interface Index {
  run: { name: string; config: string; warnings: string; failure: string; summary: string };
  points: Record<string, [number[], number[]]>;
  texts: Record<"phase" | "env" | "options" | "task_key" | "stop_reason", (string | null)[]>;
  blocks: string[];
  episodes: Record<Column, any[]>;
  tokens: Record<string, string>;
  left_out: number;
  batches: number[];
  effects: Record<string, Record<string, Effect>>;
}

async function inflate(id: string): Promise<any> {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no part ${id}`);
  const text = atob(element.textContent ?? "");
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

export const readIndex = (): Promise<Index> => inflate("index");

const blocks = new Map<string, Promise<any>>();

export async function readEpisode(index: Index, row: number): Promise<Episode> {
  const name = index.blocks[index.episodes.block[row]];
  if (!blocks.has(name)) {
    if (blocks.size > 64) blocks.clear();
    blocks.set(name, inflate(name));
  }
  const block = await blocks.get(name)!;
  return unpack(block, row, block.episode.indexOf(idOf(index, row)));
}

export function idOf(index: Index, row: number): string {
  const { phase, step, group, member } = index.episodes;
  return `${index.texts.phase[phase[row]]}-${step[row]}-${group[row]}-${member[row]}`;
}

const parse = (text: string | null) => (text === null ? null : JSON.parse(text));

function unpack(block: any, row: number, place: number): Episode {
  const first = block.starts[place];
  const last = block.starts[place + 1];
  const slice = (name: string, k: number): any[] => {
    const { counts, values } = block[name];
    let start = 0;
    for (let i = 0; i < k; i++) start += counts[i];
    return values.slice(start, start + counts[k]);
  };
  const fractions = (name: string, k: number) => slice(name, k).map((value) => (value === null ? null : value / 1e6));
  const turns: Turn[] = [];
  for (let k = first; k < last; k++) {
    if (block.turn[k] === null) continue;
    const engine = fractions("engine_logprobs", k) as number[];
    const trainer = fractions("trainer_logprobs", k);
    const sampled: number[] = slice("action_ids", k);
    const versions: number[] = slice("token_versions", k);
    turns.push({
      turn: block.turn[k],
      parent: block.parent[k],
      fork: block.fork[k],
      sequence: block.sequence[k],
      role: block.role[k],
      observation: block.observation[k],
      action: block.action[k],
      calls: parse(block.tool_calls[k]) ?? [],
      reward: block.reward[k],
      parts: parse(block.reward_parts[k]),
      messages: parse(block.messages[k]),
      tools: parse(block.tools[k]),
      agent: block.agent[k],
      state_key: block.state_key[k],
      weights_version: block.weights_version[k],
      generate_seconds: block.generate_seconds[k],
      step_seconds: block.step_seconds[k],
      prompt_ids: slice("prompt_ids", k),
      action_ids: sampled,
      values: {
        engine_logprobs: engine,
        trainer_logprobs: trainer,
        difference: trainer.map((value, i) => (value === null ? null : engine[i] - value)),
        advantages: fractions("advantages", k),
        ratios: fractions("ratios", k),
        clipped: fractions("clipped", k),
        entropies: fractions("entropies", k),
        versions: versions.length ? versions : sampled.map(() => block.weights_version[k]),
      },
    });
  }
  return { row, error: block.error[place], final: block.final_observation[place], turns };
}

// The token sequences of an episode: the turns from the first to a turn that none continues.
export function sequences(turns: Turn[]): number[][] {
  const parents = new Set(turns.map((turn) => turn.parent));
  const leaves = turns.filter((turn) => !parents.has(turn.turn));
  return leaves.map((leaf) => {
    const path: number[] = [];
    for (let at: number | null = leaf.turn; at !== null; at = turns[at].parent) path.unshift(at);
    return path;
  });
}

export interface Filter {
  phase: string;
  success: string;
  stop: string;
  task: string;
  step: [number | null, number | null];
  turns: [number | null, number | null];
  reward: [number | null, number | null];
  sort: string;
  down: boolean;
}

export const everything: Filter = {
  phase: "",
  success: "",
  stop: "",
  task: "",
  step: [null, null],
  turns: [null, null],
  reward: [null, null],
  sort: "step",
  down: true,
};

const within = (value: number, [low, high]: [number | null, number | null]) =>
  (low === null || value >= low) && (high === null || value <= high);

export function taskOf(index: Index, row: number): string {
  const { seed, options } = index.episodes;
  const more = index.texts.options[options[row]];
  return more ? `${seed[row]} ${more}` : `${seed[row]}`;
}

export function select(index: Index, filter: Filter): number[] {
  const e = index.episodes;
  const texts = index.texts;
  const phase = filter.phase ? texts.phase.indexOf(filter.phase) : -1;
  const stop = filter.stop ? texts.stop_reason.indexOf(filter.stop) : -1;
  const wanted = filter.task.trim().toLowerCase();
  const keys = texts.task_key.map((key) => wanted !== "" && (key ?? "").toLowerCase().includes(wanted));
  const rows: number[] = [];
  for (let row = 0; row < e.step.length; row++) {
    if (phase >= 0 && e.phase[row] !== phase) continue;
    if (stop >= 0 && e.stop_reason[row] !== stop) continue;
    if (filter.success && String(e.success[row]) !== filter.success) continue;
    if (!within(e.step[row], filter.step) || !within(e.num_turns[row], filter.turns)) continue;
    if (!within(e.total_reward[row], filter.reward)) continue;
    if (wanted && !keys[e.task_key[row]] && !taskOf(index, row).toLowerCase().includes(wanted)) continue;
    rows.push(row);
  }
  const way = filter.down ? -1 : 1;
  const column = filter.sort === "task" ? e.seed : (e as any)[filter.sort];
  return rows.sort((a, b) => way * (column[a] - column[b]) || a - b);
}

// The episodes of each group, in the order of the rows.
export function groupsOf(index: Index, rows: number[]): number[][] {
  const { phase, step, group, member } = index.episodes;
  const groups = new Map<string, number[]>();
  for (const row of rows) {
    const key = `${phase[row]} ${step[row]} ${group[row]}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key)!.push(row);
  }
  return [...groups.values()].map((episodes) => episodes.sort((a, b) => member[a] - member[b]));
}

// Where the page opens: at the latest group whose episodes differ, in success or else in return.
export function opening(index: Index): string {
  const e = index.episodes;
  const groups = groupsOf(index, select(index, everything));
  const differs = (column: any[]) => groups.find((rows) => rows.some((row) => column[row] !== column[rows[0]]));
  const group = differs(e.success) ?? differs(e.total_reward);
  return group ? `attempts=${idOf(index, group[0])}` : "summary";
}

const phases: Record<string, string> = { train: "Training", eval: "Evaluation", greedy: "Greedy evaluation" };
export const phaseName = (phase: string | null) => phases[phase!] ?? phase ?? "";

const endings: Record<string, string> = {
  terminated: "the environment",
  truncated: "a limit of the environment",
  max_turns: "the limit of turns",
  max_turn_tokens: "the limit of tokens of a turn",
  max_context: "the limit of the context",
  timeout: "the time limit",
  error: "an error of the environment",
  invalid: "an invalid answer of the environment",
  env_timeout: "a timeout of the environment",
  crash: "a crash of the environment",
};
export const endName = (reason: string | null) => endings[reason!] ?? reason ?? "";

export function titleOf(index: Index, row: number): string {
  const { phase, step, member } = index.episodes;
  return `${phaseName(index.texts.phase[phase[row]])}, step ${step[row]}, task ${taskOf(index, row)}, episode ${member[row] + 1}`;
}

// The value of a setting in the text of config.toml, such as learner.learning_rate.
export function setting(config: string, name: string): string {
  let section = "";
  for (const line of config.split("\n")) {
    const [, header] = /^\[(.*)\]$/.exec(line) ?? [];
    if (header) section = `${header}.`;
    const [, key, value] = /^(\w+) = (.*)$/.exec(line) ?? [];
    if (key && section + key === name) return value.replace(/^"(.*)"$/, "$1");
  }
  return "";
}

// The other attempts at the task of an episode, its own group first.
export function attempts(index: Index, row: number): number[] {
  const e = index.episodes;
  const same: number[] = [];
  const group: number[] = [];
  for (let other = 0; other < e.step.length; other++) {
    if (e.seed[other] !== e.seed[row] || e.options[other] !== e.options[row] || e.env[other] !== e.env[row]) continue;
    const own = e.phase[other] === e.phase[row] && e.step[other] === e.step[row] && e.group[other] === e.group[row];
    (own ? group : same).push(other);
  }
  return [...group, ...same];
}

export function short(value: number): string {
  if (!Number.isFinite(value)) return String(value);
  if (Math.abs(value) < 1e-12) return "0"; // that only rounding parts from 0
  if (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(3));
}

// As Python writes it in the terminal: a tie goes to the even digit.
export function percent(value: number): string {
  const tenths = 1000 * value;
  return `${((tenths % 1 === 0.5 ? 2 * Math.round(tenths / 2) : Math.round(tenths)) / 10).toFixed(1)}%`;
}

export function seconds(value: number): string {
  if (value >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`;
}

export const signed = (value: number) => (value > 0 ? "+" : "") + short(value);
