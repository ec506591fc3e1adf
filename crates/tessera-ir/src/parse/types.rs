//! Parses types with their layouts, such as `f32[4, 8] {tp: shard(0)}`.

use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, MeshError, Reduction, Shard, Uneven};

use super::{ParseResult, Parser, TokenKind};
use crate::codes::T0201;
use crate::{DType, Type};
use tessera_base::Span;

impl Parser<'_> {
    pub(super) fn parse_type(&mut self, mesh: &Mesh) -> ParseResult<Type> {
        let name = self.expect_word("a dtype")?;
        let Some(dtype) = DType::parse(&name) else {
            self.position -= 1;
            return self.expected_error("a dtype such as `f32` or `i64`");
        };
        let shape = if self.eat_punct('[') {
            self.parse_list(']', |s| s.expect_natural("an extent"))?
        } else {
            Vec::new()
        };
        let mut layout = Layout::REPLICATED;
        if self.eat_punct('{') {
            for (axis, on, span) in self.parse_list('}', Self::parse_axis_layout)? {
                if mesh.axis_size(axis) == 1 && on != AxisLayout::Replicated {
                    let m = format!("layout on {axis}, which has size 1 in mesh({mesh})");
                    return Err(self.error_at(&T0201, m, "omit this axis", span));
                }
                if layout.on_axis(axis) != AxisLayout::Replicated {
                    return Err(self.error_at(
                        &T0201,
                        format!("axis {axis} appears twice"),
                        "again here",
                        span,
                    ));
                }
                layout = layout.with_axis(axis, on);
            }
        }
        Ok(Type { dtype, shape, layout })
    }

    fn parse_axis_layout(&mut self) -> ParseResult<(Axis, AxisLayout, Span)> {
        let start = self.next_span();
        let axis = self.expect_word("a mesh axis")?;
        let axis: Axis = axis
            .parse()
            .map_err(|d: MeshError| Box::new(d.with_span_label(self.file, "this axis", start)))?;
        self.expect_punct(':')?;
        let what = self.expect_word("replicated, shard(…) or partial(…)")?;
        let on = match what.as_str() {
            "replicated" => AxisLayout::Replicated,
            "shard" => {
                self.expect_punct('(')?;
                AxisLayout::Shard(self.parse_shard()?)
            }
            "partial" => {
                self.expect_punct('(')?;
                let name = self.expect_word("a reduction")?;
                let Some(r) = Reduction::parse(&name) else {
                    self.position -= 1;
                    return self.expected_error("sum, tree or max");
                };
                let group_size = if self.eat_punct(',') { Some(self.parse_subgroup_size()?) } else { None };
                self.expect_punct(')')?;
                AxisLayout::Partial { reduction: r, subgroup_size: group_size }
            }
            _ => {
                self.position -= 1;
                return self.expected_error("replicated, shard(…) or partial(…)");
            }
        };
        Ok((axis, on, self.span_since(start)))
    }

    /// Parses `group_size=2`, the number of positions per subgroup of the axis.
    fn parse_subgroup_size(&mut self) -> ParseResult<u32> {
        if !self.eat_word("group_size") {
            return self.expected_error("group_size=…");
        }
        self.expect_punct('=')?;
        let n = self.expect_natural("a number of positions")?;
        Ok(u32::try_from(n).unwrap_or(u32::MAX))
    }

    fn parse_shard(&mut self) -> ParseResult<Shard> {
        let start = self.next_span();
        let dim = self.expect_natural("a tensor dim")? as usize;
        let (mut extent, mut unit, mut group_size) = (None, None, None);
        while self.eat_punct(',') {
            if group_size.is_some() {
                return self.expected_error("`)`: group_size= must be last");
            }
            if matches!(self.peek(), Some(TokenKind::Word(w)) if w == "group_size") {
                group_size = Some(self.parse_subgroup_size()?);
                continue;
            }
            let key = self.expect_word("extent=…, unit=… or group_size=…")?;
            self.expect_punct('=')?;
            let n = self.expect_natural("an integer")?;
            match key.as_str() {
                "extent" => extent = Some(n),
                "unit" => unit = Some(n),
                _ => {
                    return Err(self.error_at(
                        &T0201,
                        format!("unknown key `{key}` in a shard"),
                        "expected extent=, unit= or group_size=",
                        self.span_since(start),
                    ));
                }
            }
        }
        self.expect_punct(')')?;
        match (extent, unit) {
            (None, None) => Ok(Shard { dim, uneven: None, subgroup_size: group_size }),
            (Some(extent), unit) => Ok(Shard {
                dim,
                uneven: Some(Uneven { extent, unit: unit.unwrap_or(1) }),
                subgroup_size: group_size,
            }),
            (None, Some(_)) => Err(self.error_at(
                &T0201,
                "unit= without extent=",
                "an even shard needs neither",
                self.span_since(start),
            )),
        }
    }
}
