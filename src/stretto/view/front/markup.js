// Templates of elements: htm with preact.
import { h } from "preact";
import htm from "htm";

export const html = htm.bind(h);
