/** A line over places, such as layers or tokens. */

import { scaleLinear, scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { useEffect, useRef, useState } from "preact/hooks";

import { short } from "../lib/text";
import { Figure } from "./figure";

export interface Series {
  name: string;
  values: (number | null)[];
}

interface ChartProps {
  label: string;
  series: Series[];
  /** What the places are called, one for each value. */
  places: string[];
  x: string;
  y: string;
  log?: boolean;
  /** Whether small values stand at the top, as ranks do. */
  isFlipped?: boolean;
  active?: number;
  onActive?: (index: number) => void;
  domain?: [number, number];
}

const HEIGHT = 190;
const MARGIN = { top: 24, right: 28, bottom: 34, left: 48 };

export function Chart(props: ChartProps) {
  const frame = useRef<HTMLElement>(null);
  const [width, setWidth] = useState(520);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.max(240, entry!.contentRect.width)));
    watcher.observe(frame.current!);
    return () => watcher.disconnect();
  }, []);
  const found = props.series.flatMap((each) => each.values).filter((value) => value !== null);
  const extent: [number, number] = found.length ? [Math.min(...found), Math.max(...found)] : [0, 1];
  const [low, high] = props.domain ?? extent;
  const bottom = HEIGHT - MARGIN.bottom;
  const range: [number, number] = props.isFlipped ? [MARGIN.top, bottom] : [bottom, MARGIN.top];
  const across = scaleLinear([0, Math.max(1, props.places.length - 1)], [MARGIN.left, width - MARGIN.right]);
  const up = props.log
    ? scaleLog([Math.max(low, 1e-9), Math.max(high, low * 10, 10)], range)
    : scaleLinear([low, high === low ? low + 1 : high], range).nice();
  const marks = props.log ? up.ticks(4).filter((value) => Number.isInteger(Math.log10(value))) : up.ticks(4);
  const every = Math.max(1, Math.ceil(props.places.length / Math.max(2, Math.floor(width / 56))));
  const rows = () => [
    [props.x, ...props.series.map((each) => each.name)],
    ...props.places.map((place, index) => [place, ...props.series.map((each) => each.values[index] ?? null)]),
  ];
  const path = line<number | null>()
    .defined((value) => value !== null)
    .x((_, index) => across(index))
    .y((value) => up(value!));
  const point = (event: MouseEvent) => {
    const box = frame.current!.getBoundingClientRect();
    const index = Math.round(across.invert(event.clientX - box.left));
    if (index >= 0 && index < props.places.length) props.onActive?.(index);
  };
  return (
    <figure class="chart" ref={frame} hidden={!found.length}>
      <Figure label={props.label} rows={rows}>
        <svg width={width} height={HEIGHT} role="img" aria-label={props.label} onMouseMove={point}>
          {marks.map((value) => (
            <g key={value}>
              <line class="rule" x1={MARGIN.left} x2={width - MARGIN.right} y1={up(value)} y2={up(value)} />
              <text class="tick" x={MARGIN.left - 6} y={up(value)} dy="0.32em" text-anchor="end">
                {short(value).replace(/\.0+$/, "")}
              </text>
            </g>
          ))}
          {props.places.map((place, index) =>
            index % every ? null : (
              <text key={index} class="tick" x={across(index)} y={bottom + 17} text-anchor="middle">
                {place.length > 9 ? `${place.slice(0, 8)}…` : place}
              </text>
            ),
          )}
          <text class="axis" x={width - MARGIN.right} y={HEIGHT - 4} text-anchor="end">
            {props.x}
          </text>
          <text class="axis" x={4} y={10}>
            {props.y}
          </text>
          {props.series.map((each, index) => (
            <path key={each.name} class={`line line-${index}`} d={path(each.values) ?? ""} />
          ))}
          {props.series.map((each, index) =>
            each.values.map((value, place) =>
              value === null || (props.places.length > 60 && place !== props.active) ? null : (
                <circle
                  key={`${index}-${place}`}
                  class={`dot line-${index} ${place === props.active ? "here" : ""}`}
                  cx={across(place)}
                  cy={up(value)}
                  r={place === props.active ? 5 : 2.5}
                >
                  <title>{`${props.places[place]}: ${short(value)}`}</title>
                </circle>
              ),
            ),
          )}
        </svg>
        {props.series.length > 1 && (
          <figcaption>
            {props.series.map((each, index) => (
              <span key={each.name} class="key">
                <i class={`swatch line-${index}`} />
                {each.name}
              </span>
            ))}
          </figcaption>
        )}
      </Figure>
    </figure>
  );
}
