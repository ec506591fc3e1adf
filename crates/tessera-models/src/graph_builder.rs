//! Builds the logical programs of a model, op by op.

use std::collections::BTreeMap;

use tessera_ir::{Builder, DType, Opcode, Program, Type, ValueId};

use crate::video_model::VideoModel;

/// A program under construction, the model, and the attribute `at` of the next ops.
pub(crate) struct GraphBuilder<'a> {
    pub(crate) builder: Builder,
    pub(crate) model: &'a VideoModel,
    location: String,
    /// The modulations so far, by the name of their table. Both passes have the same ones, and a GPU adds
    /// all of them in one launch only if each table is read once.
    modulations: BTreeMap<String, ValueId>,
}

impl<'a> GraphBuilder<'a> {
    pub(crate) fn new(model: &'a VideoModel, name: &str) -> GraphBuilder<'a> {
        GraphBuilder {
            builder: Builder::new_logical(name),
            model,
            location: "first".into(),
            modulations: BTreeMap::new(),
        }
    }

    pub(crate) fn finish(self) -> Program {
        match self.builder.finish() {
            Ok(p) => p,
            Err(e) => panic!("a parsed model violates a rule of the op table: {}", e[0].message),
        }
    }

    pub(crate) fn set_location(&mut self, location: &str) {
        self.location = location.to_string();
    }

    pub(crate) fn emit_op(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        let at = self.location.clone();
        self.builder.set_attr("at", at.as_str());
        self.builder.add_op(opcode, operands)
    }

    /// Emits a weight, or returns the one of this name that the program has already: the second pass through
    /// the blocks reads each weight again.
    pub(crate) fn emit_weight(&mut self, name: &str, shape: &[u64], part: &str, unit: u64) -> ValueId {
        let at = self.location.clone();
        self.builder.set_attr("at", at.as_str()).set_attr("part", part);
        if unit > 1 {
            self.builder.set_attr("unit", unit);
        }
        self.builder.set_label(name).add_weight(name, Type::new(DType::F32, shape))
    }

    /// Emits the sum of a table [1, parts, dim] and a time embedding, or returns the one of this name that
    /// the program has already.
    pub(crate) fn emit_modulation(&mut self, name: &str, parts: u64, embedding: ValueId) -> ValueId {
        if let Some(modulation) = self.modulations.get(name) {
            return *modulation;
        }
        let table = self.emit_weight(name, &[1, parts, self.model.wan.dim], "whole", 1);
        let modulation = self.emit_op(Opcode::Modulation, &[table, embedding]);
        self.modulations.insert(name.to_string(), modulation);
        modulation
    }

    pub(crate) fn read_buffer(&mut self, buffer: &str, rows: u64, ty: Type) -> ValueId {
        let at = self.location.clone();
        let whole = ty.shape[0];
        let buffer = self.builder.declare_buffer(buffer, ty);
        self.builder.set_attr("at", at.as_str());
        if rows != whole {
            self.builder.set_attr("rows", rows);
        }
        self.builder.read_buffer(buffer)
    }

    pub(crate) fn write_buffer(&mut self, buffer: &str, ty: Type, value: ValueId, row: Option<ValueId>) {
        let at = self.location.clone();
        let buffer = self.builder.declare_buffer(buffer, ty);
        self.builder.set_attr("at", at.as_str());
        if let Some(row) = row {
            self.builder.add_keyed("row", row);
        }
        self.builder.write_buffer(buffer, value);
    }
}
