import { percent, short, signed, type Effect, type Index } from "./data";

const columns: [string, string, (effect: Effect) => string][] = [
  ["cosine", "Cosine of the gradient of the whole batch and the run's", ({ cosine }) => (cosine === null ? "" : cosine.toFixed(3))],
  ["gradient", "Norm of the gradient of the whole batch, before the update", ({ norm }) => known(norm, short)],
  ["clipped", "Share of the update's tokens whose gradient the clip blocks", ({ clipped }) => known(clipped, percent)],
  ["tokens turned", "Share of the trained tokens whose advantage has the opposite sign", ({ turned_tokens }) => known(turned_tokens, percent)],
  ["turns turned", "The same for turns, by the sums of their advantages", ({ turned_turns }) => known(turned_turns, percent)],
  ["best episodes", "Change of the log-probability of each group's best episodes by the update, in nats", ({ best }) => known(best, signed)],
  ["worst episodes", "The same for each group's worst episodes", ({ worst }) => known(worst, signed)],
  ["outcome", "Predicted change of the mean outcome", ({ outcome }) => known(outcome, signed)],
];

const known = (value: number | null, form: (value: number) => string) => (value === null ? "" : form(value));

// What other settings would do with the kept batches: a table for each step that was asked about.
export function WhatIf({ index }: { index: Index }) {
  const steps = index.batches.filter((step) => index.effects[step]);
  if (!steps.length) {
    const [step] = index.batches.slice(-1);
    if (step === undefined) return null;
    return <p class="soft">The batch of step {step} is kept. See what other settings would do with it: <code>gspo-env whatif {index.run.name} --step {step} --arm loss=cispo,grpo</code></p>;
  }
  return (
    <section class="whatif" aria-label="Other settings">
      <h2>Other settings on the same tokens</h2>
      <p class="soft">
        Turned: the sign of the advantage is not the run's. Episodes: by how many nats the update changes the log-probability of each group's best and worst. Outcome: by how much it would change the mean outcome, which is too high, because the same episodes make the update. One batch is one sample: it shows what settings do, not which learn better, which <code>gspo-env compare</code> tests.
      </p>
      {steps.map((step) => (
        <div class="scroll" key={step} role="region" aria-label={`Step ${step}`} tabIndex={0}>
          <table>
            <caption>Update of step {step}</caption>
            <thead>
              <tr>
                <th scope="col">arm</th>
                {columns.map(([name, what]) => <th scope="col" key={name} title={what}>{name}</th>)}
              </tr>
            </thead>
            <tbody>
              {Object.entries(index.effects[step]).map(([arm, effect]) => (
                <tr key={arm}>
                  <th scope="row">{arm}</th>
                  {columns.map(([name, , form]) => <td key={name}>{form(effect)}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ))}
    </section>
  );
}
