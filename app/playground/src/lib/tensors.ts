/** Tensors as the server sends them: inside the answer, or in a safetensors file behind a URL. */

import { bytes } from "../api/client";
import type { TensorObject, TensorReference } from "../api/types";

/** A tensor's bytes, little-endian and row-major. */
export interface Tensor {
  dtype: string;
  shape: number[];
  data: Uint8Array;
}

const SIZES: Record<string, number> = { float32: 4, float16: 2, bfloat16: 2 };

/** Returns a tensor, fetching its file once however many tensors of it are asked for. */
export async function tensorOf(
  reference: TensorReference,
  files: Map<string, Promise<ArrayBuffer>>,
  signal?: AbortSignal,
): Promise<Tensor> {
  const { dtype, shape } = reference;
  if ("data" in reference) return { dtype, shape, data: fromBase64(reference.data) };
  const file = files.get(reference.url) ?? bytes(reference.url, signal);
  files.set(reference.url, file);
  return { dtype, shape, data: entry(await file, reference.key) };
}

/** Returns the bytes of one tensor of a safetensors file: a length, a JSON header, then the data. */
function entry(file: ArrayBuffer, key: string): Uint8Array {
  const headerBytes = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, headerBytes))) as Record<
    string,
    { data_offsets: [number, number] }
  >;
  const [start, stop] = header[key]!.data_offsets;
  return new Uint8Array(file, 8 + headerBytes + start, stop - start);
}

/** Returns the numbers of a float32 tensor. */
export function numbers(tensor: Tensor): Float32Array {
  if (tensor.dtype !== "float32") throw new Error(`Captured values should be float32, got ${tensor.dtype}.`);
  return new Float32Array(tensor.data.slice().buffer);
}

/** Returns a float32 vector with its numbers shuffled and given random signs: a random direction of its norm. */
export function randomLike(tensor: Tensor, seed: number): TensorObject {
  const values = numbers(tensor);
  let state = seed;
  const random = () => {
    // mulberry32
    state = (state + 0x6d2b79f5) | 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
  for (let last = values.length - 1; last >= 0; last -= 1) {
    const other = Math.floor(random() * (last + 1));
    const sign = random() < 0.5 ? -1 : 1;
    [values[last], values[other]] = [sign * values[other]!, values[last]!];
  }
  const data = toBase64(new Uint8Array(values.buffer));
  return { dtype: "float32", shape: [values.length], data, encoding: "base64" };
}

/** Returns one row of a tensor as what `patch` takes. */
export function rowOf(tensor: Tensor, row: number): TensorObject {
  const width = tensor.shape.slice(1).reduce((product, size) => product * size, 1);
  const size = width * SIZES[tensor.dtype]!;
  const data = toBase64(tensor.data.subarray(row * size, (row + 1) * size));
  return { dtype: tensor.dtype, shape: [1, width], data, encoding: "base64" };
}

function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function toBase64(data: Uint8Array): string {
  return btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join(""));
}
