/** The tokens of a text with detectors' scores below each, and where conditions held. */

import { useState } from "preact/hooks";

import type { Detector } from "../api/types";
import { named } from "../lib/names";
import { short, visible } from "../lib/text";
import type { Watched } from "../lib/watching";
import { usePage } from "../state/hooks";
import { Tokens } from "./tokens";

interface Scale {
  detector: string;
  values: Map<number, number | null>;
  threshold: number | null;
  low: number;
  high: number;
}

export function WatchedText(props: { title: string; watched: Watched }) {
  const { detectors } = usePage();
  const { tokens, promptLength, scores, held } = props.watched;
  const [active, setActive] = useState(0);
  const scales = [...scores].map(([detector, values]) => scaleOf(detector, values, detectors));
  if (!scales.length && !held.size) return null;
  const last = Math.max(-1, ...held.keys(), ...scales.flatMap(({ values }) => [...values.keys()]));
  const count = Math.max(tokens.length, last + 1);
  const look = (position: number) => ({
    title: sentenceOf(props.watched, scales, position),
    class: `${position < promptLength ? "prompt" : ""} ${held.has(position) ? "held" : ""}`,
    content: (
      <>
        <span class="token">{visible(tokens[position] ?? "…")}</span>
        {scales.map((scale) => (
          <Bar key={scale.detector} scale={scale} position={position} />
        ))}
        {held.get(position)?.map((name) => (
          <span key={name} class="hidden">{` ${name} holds`}</span>
        ))}
      </>
    ),
  });
  return (
    <section class="measure" aria-label={`${props.title}, token by token`}>
      <p class="hint">
        {scales.map(({ detector, threshold }) => (
          <span key={detector} class="scale">
            {detector}
            {threshold === null ? "" : `, threshold ${short(threshold)}`}
          </span>
        ))}
        {held.size > 0 && <span class="scale">⚑ a condition holds</span>}
      </p>
      <Tokens
        label={`${props.title}: scores of tokens`}
        class="strip"
        count={count}
        look={look}
        active={active}
        onActive={setActive}
        follows
      />
      <p class="status">{sentenceOf(props.watched, scales, Math.min(active, count - 1))}</p>
    </section>
  );
}

function Bar(props: { scale: Scale; position: number }) {
  const { detector, values, threshold, low, high } = props.scale;
  const value = values.get(props.position) ?? null;
  const part = (number: number) => `${Math.round((100 * (number - low)) / (high - low))}%`;
  const isOver = threshold !== null && value !== null && value > threshold;
  return (
    <>
      <span
        class={`bar ${isOver ? "over" : ""}`}
        style={{
          "--part": value === null ? "0%" : part(value),
          "--bound": threshold === null ? "0%" : part(threshold),
        }}
      >
        {threshold !== null && <span class="bound" />}
      </span>
      <span class="hidden">{` ${detector} `}</span>
      <span class="number">{value === null ? "–" : short(value)}</span>
    </>
  );
}

/** Returns how a detector's bars are drawn: from nothing to 1 where its scores are shares. */
function scaleOf(detector: string, values: Map<number, number | null>, detectors: Detector[]): Scale {
  const threshold = named(detector, detectors)?.threshold ?? null;
  const numbers = [...values.values(), threshold].filter((value) => value !== null);
  const low = Math.min(0, ...numbers);
  const high = Math.max(low < 0 ? low + 1e-6 : 1, ...numbers);
  return { detector, values, threshold, low, high };
}

function sentenceOf({ tokens, held }: Watched, scales: Scale[], position: number): string {
  const scores = scales.map(({ detector, values }) => {
    const value = values.get(position);
    if (value === undefined) return `no score of ${detector}`;
    return `${detector} ${value === null ? "is not a number" : short(value)}`;
  });
  const said = [...scores, ...(held.get(position) ?? []).map((name) => `${name} holds`)].join("; ");
  return `${visible(tokens[position] ?? "")}, position ${position}${said ? `: ${said}` : ""}`;
}
