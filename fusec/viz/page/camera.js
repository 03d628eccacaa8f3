// Camera and pointer.

function resize() {
  const box = canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  view.width = box.width; view.height = box.height;
  canvas.width = Math.round(box.width * ratio); canvas.height = Math.round(box.height * ratio);
  draw();
}
function frame(x, y, w, h, most = 1) {
  view.scale = Math.max(0.01, Math.min(most, (view.width - 48) / Math.max(w, 1), (view.height - 48) / Math.max(h, 1)));
  view.x = view.width / 2 - (x + w / 2) * view.scale;
  view.y = view.height / 2 - (y + h / 2) * view.scale;
  draw();
}
function frameAll() { // the whole graph
  if (states.length) frame(0, 0, measure(shown().root).w, measure(shown().root).h);
}
function frameTop() { // the whole graph if it is legible; else its upper end at a legible size
  if (!states.length) return;
  frameAll();
  if (view.scale > 0.6) return;
  const m = measure(shown().root);
  view.scale = Math.max(view.scale, Math.min(0.95, (view.width - 48) / m.w));
  view.scale = Math.max(view.scale, 0.6);
  const middle = m.w * view.scale > view.width ? m.x[0] : m.w / 2; // a wide graph begins where its first box is
  view.x = view.width / 2 - middle * view.scale; view.y = 24;
  draw();
}
function heightInSight() { // above the details, which on a phone cover the lower part
  const panel = $("right").getBoundingClientRect(), { top, right } = canvas.getBoundingClientRect();
  return panel.height && panel.left < right - 1 ? Math.min(view.height, panel.top - top) : view.height;
}
function centre(p, scale = Math.max(view.scale, 0.95)) {
  view.scale = scale;
  view.x = view.width / 2 - (p.x + p.w / 2) * scale;
  view.y = heightInSight() * 0.4 - (p.y + Math.min(p.h, 120) / 2) * scale;
  draw();
}
function isUnderMap(right, bottom) { // also where the map is not on show yet
  const map = getComputedStyle($("map"));
  return right > view.width - 10 - parseFloat(map.width) && bottom > view.height - 10 - parseFloat(map.height);
}
function show(p) { // move as little as needed
  const [x, y] = [view.x + p.x * view.scale, view.y + p.y * view.scale], [w, h] = [p.w * view.scale, Math.min(p.h * view.scale, 120)];
  if (view.scale < 0.6 || x < 10 || y < 10 || x + Math.min(w, view.width) > view.width || y + h > heightInSight() - 10 || isUnderMap(x + w, y + h)) centre(p);
  draw();
}
function keeping(box, change) {
  // Run a change of the layout while the box stays where it is on the screen.
  const was = box && find(p => same(p.box, box));
  change();
  measured.clear();
  const now = was && find(p => same(p.box, box));
  if (now) { view.x += (was.x - now.x + (was.w - now.w) / 2) * view.scale; view.y += (was.y - now.y) * view.scale; }
  draw();
}
function toggle(box) { keeping(box, () => open.has(box.g) ? open.delete(box.g) : open.add(box.g)); }
function zoom(factor, x = view.width / 2, y = view.height / 2) {
  const scale = Math.min(3, Math.max(0.01, view.scale * factor)), ratio = scale / view.scale;
  view.x = x - (x - view.x) * ratio; view.y = y - (y - view.y) * ratio; view.scale = scale;
  draw();
}
function openAll() {
  keeping(selected, () => { for (const [id, group] of Object.entries(shown().groups)) if (group.kind !== "region") open.add(id); });
  frameTop();
}
function closeAll() { open.clear(); measured.clear(); frameTop(); }

function under(event) {
  const box = canvas.getBoundingClientRect();
  const x = (event.clientX - box.left - view.x) / view.scale, y = (event.clientY - box.top - view.y) / view.scale;
  let hit = null;
  places(p => {
    const inside = x >= p.x && x <= p.x + p.w && y >= p.y && y <= p.y + p.h;
    if (inside) hit = { ...p, px: x, py: y };
    return inside;
  });
  if (hit && hit.box.g && open.has(hit.box.g) && hit.py > hit.y + HEAD) return null;
  return hit;
}
function listen() {
  let drag = null, pinch = 0;
  const fingers = new Map();
  const spread = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.x - b.x, a.y - b.y); };
  canvas.addEventListener("pointerdown", e => {
    fingers.set(e.pointerId, { x: e.clientX, y: e.clientY });
    drag = { x: e.clientX, y: e.clientY, vx: view.x, vy: view.y, moved: fingers.size > 1 };
    if (fingers.size === 2) pinch = spread();
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", e => {
    if (fingers.has(e.pointerId)) fingers.set(e.pointerId, { x: e.clientX, y: e.clientY });
    if (fingers.size === 2) {
      const now = spread(), box = canvas.getBoundingClientRect(), [a, b] = [...fingers.values()];
      zoom(now / pinch, (a.x + b.x) / 2 - box.left, (a.y + b.y) / 2 - box.top);
      pinch = now;
    } else if (drag) {
      const dx = e.clientX - drag.x, dy = e.clientY - drag.y;
      if (drag.moved || Math.hypot(dx, dy) > 4) { drag.moved = true; canvas.classList.add("drag"); view.x = drag.vx + dx; view.y = drag.vy + dy; draw(); }
    } else {
      const hit = under(e);
      canvas.classList.toggle("over", Boolean(hit));
      if (!same(hit && hit.box, hovered) && (hit || hovered)) { hovered = hit && hit.box; draw(); }
    }
  });
  canvas.addEventListener("pointerup", e => {
    const click = drag && !drag.moved;
    fingers.delete(e.pointerId);
    drag = null; canvas.classList.remove("drag");
    if (!click) return;
    const hit = under(e);
    if (!hit) return select(null);
    const box = hit.box, arrow = box.g && hit.px < hit.x + 25;
    select(box);
    if (box.g && (box.k === undefined || arrow || open.has(box.g))) toggle(box);
  });
  canvas.addEventListener("pointercancel", e => { fingers.delete(e.pointerId); drag = null; });
  canvas.addEventListener("dblclick", e => { const hit = under(e); if (hit && hit.box.g && hit.box.k !== undefined) toggle(hit.box); });
  canvas.addEventListener("wheel", e => {
    e.preventDefault();
    const box = canvas.getBoundingClientRect();
    if (e.shiftKey) { view.x -= e.deltaY || e.deltaX; draw(); } else zoom(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0014)), e.clientX - box.left, e.clientY - box.top);
  }, { passive: false });
  const small = $("map");
  const jump = e => {
    const box = small.getBoundingClientRect();
    view.x = view.width / 2 - (e.clientX - box.left - map.x) / map.scale * view.scale;
    view.y = view.height / 2 - (e.clientY - box.top - map.y) / map.scale * view.scale;
    draw();
  };
  small.addEventListener("pointerdown", e => { small.setPointerCapture(e.pointerId); jump(e); });
  small.addEventListener("pointermove", e => { if (e.buttons) jump(e); });
}
