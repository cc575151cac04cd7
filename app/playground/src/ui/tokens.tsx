/** The tokens of a text, gone through with the arrow keys; one of them is chosen. */

import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";

export interface TokenLook {
  /** What is said when it is pointed at. */
  title: string;
  /** What it is called, where that is not its content. */
  label?: string;
  class?: string;
  /** Colour, 0 to 1. */
  heat?: number;
  content: ComponentChildren;
}

interface TokensProps {
  label: string;
  class: string;
  count: number;
  look: (position: number) => TokenLook;
  active: number;
  onActive: (position: number) => void;
  /** Whether a token is also chosen by pointing at it. */
  follows?: boolean;
}

export function Tokens(props: TokensProps) {
  const list = useRef<HTMLDivElement>(null);
  const active = Math.max(0, Math.min(props.count - 1, props.active));
  const shouldFocus = useRef(false);
  useLayoutEffect(() => {
    if (!shouldFocus.current) return;
    shouldFocus.current = false;
    list.current?.querySelector<HTMLElement>('[tabindex="0"]')?.focus();
  }, [active]);
  const onKey = (event: KeyboardEvent) => {
    const places: Record<string, number> = {
      ArrowLeft: active - 1,
      ArrowRight: active + 1,
      Home: 0,
      End: props.count - 1,
    };
    const place = places[event.key];
    if (place === undefined) return;
    event.preventDefault();
    shouldFocus.current = true;
    props.onActive(Math.max(0, Math.min(props.count - 1, place)));
  };
  const choose = (event: Event) => {
    const token = (event.target as Element).closest<HTMLElement>("[data-position]");
    if (token) props.onActive(Number(token.dataset["position"]));
  };
  return (
    <div
      ref={list}
      role="listbox"
      aria-label={props.label}
      aria-orientation="horizontal"
      class={props.class}
      onKeyDown={onKey}
      onClick={choose}
      onFocusIn={choose}
      onMouseOver={props.follows ? choose : undefined}
    >
      {Array.from({ length: props.count }, (_, position) => {
        const look = props.look(position);
        return (
          <span
            key={position}
            role="option"
            data-position={position}
            class={`${look.class ?? ""} ${position === active ? "here" : ""}`}
            tabIndex={position === active ? 0 : -1}
            aria-selected={position === active}
            aria-label={look.label}
            title={look.title}
            style={{ "--heat": String(Math.round((look.heat ?? 0) * 100)) }}
          >
            {look.content}
          </span>
        );
      })}
    </div>
  );
}
