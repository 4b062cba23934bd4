// What test_page_layouts.py runs in the page: an object of functions on the tab's own view.
({
  // Where an element is drawn on the screen, scrolled to if it is out of view.
  point: ([side, identity]) => {
    const { map } = kvxPage.shown.handle.view.sides[side];
    const { table, geometry, scroller } = map;
    let cell = 0;
    const same = (one) => one && Object.entries(identity).every(([name, value]) => one[name] === value);
    while (!same(table.identity(cell))) cell += 1;
    map.reveal(table.section[cell], table.start[cell], table.size[cell]);
    const rect = geometry.rects(table.section[cell], table.start[cell], table.size[cell])[0];
    const box = scroller.getBoundingClientRect();
    return [box.left + rect.x + rect.w / 2, box.top + rect.y - scroller.scrollTop + rect.h / 2];
  },

  // Every engine's row drawn on the left, and compared with its vector: what a byte holds, what a point hits, which colour is there.
  compare: (cases) => {
    const { view } = kvxPage.shown.handle;
    const wrong = [];
    let points = 0, pixels = 0;
    for (const one of cases) {
      const { spec } = one;
      const name = one.name.split(" ")[1];
      view.page.link.set({ left: name, layers: spec.num_layers, tokens: spec.num_blocks * spec.block_size, heads: spec.num_kv_heads,
          dim: spec.head_dim, "left-block": spec.block_size, by: "position" });
      view.read();
      const { map, shown } = view.sides.left;
      if (shown.error) { wrong.push(`${name}: ${shown.error}`); continue; }
      const { table, geometry } = map;
      const total = one.planes.reduce((n, plane) => n + plane.axes.reduce((m, [, size]) => m * size, 1), 0);
      if (table.count !== total) wrong.push(`${name}: ${table.count} cells, expected ${total}`);
      map.draw();
      for (const plane of one.planes) for (const [point, buffer, byte] of plane.elements) {
        points += 1;
        const cell = table.at(buffer, byte);
        const at = cell < 0 ? null : { plane: shown.cache.planes[table.plane[cell]].name, ...table.coordinates(cell) };
        const want = { plane: plane.name, ...Object.fromEntries(plane.axes.map(([axis], i) => [axis, point[i]])) };
        if (JSON.stringify(at) !== JSON.stringify(want)) wrong.push(`${name}: byte ${byte} of ${buffer} is ${JSON.stringify(at)}, not ${JSON.stringify(want)}`);
        const rect = geometry.rects(table.section[cell], table.start[cell], table.size[cell])[0];
        const box = map.scroller.getBoundingClientRect();
        if (map.cellAt(box.left + rect.x + 1, box.top + rect.y + 1 - map.scroller.scrollTop) !== cell) wrong.push(`${name}: another cell is hit at byte ${byte}`);
        const y = rect.y - map.scroller.scrollTop;
        if (y < 0 || y > map.scroller.clientHeight - 4) continue;
        pixels += 1;
        const [r, g, b] = map.canvas.getContext("2d").getImageData(Math.round(rect.x + 1), Math.round(y + 1), 1, 1).data;
        const hex = "#" + [r, g, b].map((n) => n.toString(16).padStart(2, "0")).join("");
        if (hex !== map.look.colour(cell)) wrong.push(`${name}: byte ${byte} is drawn ${hex}, not ${map.look.colour(cell)}`);
      }
    }
    return { wrong, points, pixels };
  },

  // The same of states, by the number of cells.
  states: (cases) => {
    const { view } = kvxPage.shown.handle;
    const wrong = [];
    for (const one of cases) {
      const [, name, kind] = one.name.split(" ");
      view.page.link.set({ left: `state.${name}.${kind}`, layers: 2, blocks: 3, heads: 2, channels: 12, rows: 4, columns: 6, taps: 3, "left-format": "f32" });
      view.read();
      const { table } = view.sides.left.map;
      const total = one.planes.reduce((n, plane) => n + plane.axes.reduce((m, [, size]) => m * size, 1), 0);
      if (table?.count !== total) wrong.push(`${name}: ${view.sides.left.shown.error ?? table.count}`);
    }
    return wrong;
  },

  // Milliseconds from frame to frame while the map scrolls and the mouse moves.
  frames: async (side) => {
    const { map } = kvxPage.shown.handle.view.sides[side];
    const box = map.scroller.getBoundingClientRect();
    const frame = () => new Promise(requestAnimationFrame);
    await frame();
    const times = [];
    let last = performance.now();
    for (let i = 0; i < 60; i++) {
      if (i < 30) map.scroller.scrollTop += 157;
      const at = { clientX: box.left + 70 + (i * 37) % (box.width - 90), clientY: box.top + 40 + (i * 13) % (box.height - 60), bubbles: true };
      map.scroller.dispatchEvent(new PointerEvent("pointermove", at));
      await frame();
      const now = performance.now();
      times.push(now - last);
      last = now;
    }
    return times.sort((a, b) => a - b);
  },
  })
