//! The grammar of types and layouts.

use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, MeshError, Reduction, Shard, Uneven};

use super::{Parsed, Parser, T0201, Tok};
use crate::{DType, Type};
use tessera_base::Span;

impl Parser<'_> {
    pub(super) fn ty(&mut self, mesh: &Mesh) -> Parsed<Type> {
        let name = self.word("a dtype")?;
        let Some(dtype) = DType::parse(&name) else {
            self.at -= 1;
            return self.expected("a dtype such as `f32` or `i64`");
        };
        let shape = if self.eat('[') { self.list(']', |s| s.natural("an extent"))? } else { Vec::new() };
        let mut layout = Layout::REPLICATED;
        if self.eat('{') {
            for (axis, on, span) in self.list('}', Self::axis_layout)? {
                if mesh.size(axis) == 1 && on != AxisLayout::Replicated {
                    let m = format!("layout on {axis}, which has one rank in mesh({mesh})");
                    return Err(self.error(&T0201, m, "leave it out", span));
                }
                if layout.on(axis) != AxisLayout::Replicated {
                    return Err(self.error(
                        &T0201,
                        format!("axis {axis} is given twice"),
                        "again here",
                        span,
                    ));
                }
                layout = layout.with(axis, on);
            }
        }
        Ok(Type { dtype, shape, layout })
    }

    fn axis_layout(&mut self) -> Parsed<(Axis, AxisLayout, Span)> {
        let start = self.span();
        let axis = self.word("a mesh axis")?;
        let axis: Axis =
            axis.parse().map_err(|d: MeshError| Box::new(d.at_span(self.file, "this axis", start)))?;
        self.need(':')?;
        let what = self.word("replicated, shard(…) or partial(…)")?;
        let on = match what.as_str() {
            "replicated" => AxisLayout::Replicated,
            "shard" => {
                self.need('(')?;
                AxisLayout::Shard(self.shard()?)
            }
            "partial" => {
                self.need('(')?;
                let name = self.word("a reduction")?;
                let Some(r) = Reduction::parse(&name) else {
                    self.at -= 1;
                    return self.expected("sum, tree or max");
                };
                let ways = if self.eat(',') { Some(self.ways()?) } else { None };
                self.need(')')?;
                AxisLayout::Partial { reduction: r, ways }
            }
            _ => {
                self.at -= 1;
                return self.expected("replicated, shard(…) or partial(…)");
            }
        };
        Ok((axis, on, self.since(start)))
    }

    /// `ways=2`: positions of a block of the axis.
    fn ways(&mut self) -> Parsed<u32> {
        if !self.eat_word("ways") {
            return self.expected("ways=…");
        }
        self.need('=')?;
        let n = self.natural("a number of positions")?;
        Ok(u32::try_from(n).unwrap_or(u32::MAX))
    }

    fn shard(&mut self) -> Parsed<Shard> {
        let start = self.span();
        let dim = self.natural("a tensor dim")? as usize;
        let (mut of, mut unit, mut ways) = (None, None, None);
        while self.eat(',') {
            if ways.is_some() {
                return self.expected("`)`: ways= stands last");
            }
            if matches!(self.peek(), Some(Tok::Word(w)) if w == "ways") {
                ways = Some(self.ways()?);
                continue;
            }
            let key = self.word("of=…, unit=… or ways=…")?;
            self.need('=')?;
            let n = self.natural("a whole number")?;
            match key.as_str() {
                "of" => of = Some(n),
                "unit" => unit = Some(n),
                _ => {
                    return Err(self.error(
                        &T0201,
                        format!("`{key}` in a shard"),
                        "of=, unit= or ways=",
                        self.since(start),
                    ));
                }
            }
        }
        self.need(')')?;
        match (of, unit) {
            (None, None) => Ok(Shard { dim, uneven: None, ways }),
            (Some(extent), unit) => {
                Ok(Shard { dim, uneven: Some(Uneven { extent, unit: unit.unwrap_or(1) }), ways })
            }
            (None, Some(_)) => {
                Err(self.error(&T0201, "unit= without of=", "an even shard needs neither", self.since(start)))
            }
        }
    }
}
