/** The positions at which something acts. */

import type { ComponentChildren } from "preact";

import { PHASES, WHERE, type SteerState, type WhereState } from "../state/page";
import { integers, problemOf, rangeOf } from "../lib/where";
import { Choice, TextField } from "./parts";

const PHASE_NAMES: Record<(typeof PHASES)[number], string> = {
  all: "prompt and answer",
  prompt: "the prompt",
  generated: "the answer",
};

export function Where(props: {
  scope: Pick<SteerState, "where">;
  onChange: (part: { where: WhereState }) => void;
  /** Fields beside those of the positions. */
  children?: ComponentChildren;
}) {
  const { where } = props.scope;
  const set = (part: Partial<WhereState>) => props.onChange({ where: { ...where, ...part } });
  const isNarrowed = JSON.stringify(where) !== JSON.stringify(WHERE);
  return (
    <details class="where">
      <summary>Where{isNarrowed ? ` (${summary(where)})` : ": at every position"}</summary>
      <Choice
        label="Phase"
        value={where.phase}
        options={PHASES.map((phase) => [phase, PHASE_NAMES[phase]] as const)}
        onChange={(phase) => set({ phase })}
      />
      <div class="fields">
        <TextField
          label="Positions"
          value={where.positions}
          hint="0, 3, -1; negative: from the prompt's end"
          problem={problemOf(() => integers(where.positions, "Positions"))}
          onChange={(positions) => set({ positions })}
        />
        <TextField
          label="Range"
          value={where.range}
          hint="3:9 or -4:, end excluded"
          problem={problemOf(() => rangeOf(where.range))}
          onChange={(range) => set({ range })}
        />
        <TextField
          label="Tokens"
          value={where.tokens}
          hint="as shown, ·Paris, or with blanks; commas between; ids as #7042"
          onChange={(tokens) => set({ tokens })}
        />
        <TextField
          label="Exclude positions"
          value={where.exceptPositions}
          hint="such as 0, the first"
          problem={problemOf(() => integers(where.exceptPositions, "Exclude positions"))}
          onChange={(exceptPositions) => set({ exceptPositions })}
        />
        <TextField
          label="Exclude tokens"
          value={where.exceptTokens}
          onChange={(exceptTokens) => set({ exceptTokens })}
        />
        {props.children}
      </div>
    </details>
  );
}

function summary(where: WhereState): string {
  const said = [
    where.phase === "all" ? "" : PHASE_NAMES[where.phase],
    where.positions && `positions ${where.positions}`,
    where.range && `range ${where.range}`,
    where.tokens && `tokens ${where.tokens}`,
    where.exceptPositions && `not ${where.exceptPositions}`,
    where.exceptTokens && `not ${where.exceptTokens}`,
  ];
  return said.filter(Boolean).join("; ");
}
