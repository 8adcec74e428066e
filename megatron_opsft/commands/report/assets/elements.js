"use strict";
// Functions that the other scripts share. Texts of responses only become text nodes, never HTML.

const page = JSON.parse(document.getElementById("data").textContent);

/** An element of HTML: h("td", {class: "text", onclick: f}, "text", child, [more]). */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An element of SVG. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (isPresent(value) && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter(isPresent));
  return element;
}

function isPresent(value) {
  return value !== null && value !== undefined;
}

/** A value for people; a dash for none. */
function shown(value, digits = 3) {
  if (!isPresent(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size > 0 && size < 1e-3) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

function percent(value, digits = 1) {
  return isPresent(value) ? `${(100 * value).toFixed(digits)} %` : "–";
}

function last(values) {
  return values && values.length ? values[values.length - 1] : null;
}

/** A button that is pressed or not. */
function toggle(text, isPressed, onclick) {
  return h("button", { type: "button", "aria-pressed": String(isPressed), onclick }, text);
}

function labelled(text, control) {
  return h("label", {}, h("span", {}, text), control);
}

function options(pairs) {
  return pairs.map(([value, text]) => h("option", { value }, text));
}
