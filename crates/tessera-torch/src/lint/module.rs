//! The functions and classes of a file, and which of them run as compiled code.

use std::collections::{BTreeMap, BTreeSet};

use super::names::Names;
use super::syntax::{Class, Expr, ExprKind, Function, Stmt, StmtKind, visit_statements};

/// How a piece of code runs, as far as the file shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `torch.compile` traces it.
    Compiled,
    /// It runs eagerly: something keeps it out of compiled code.
    Eager,
    /// The file does not compile it. Another file may.
    Unknown,
}

/// Values in the order of the text, each with the scope of its names.
pub type Values<'a> = Vec<(usize, &'a Expr)>;

/// A function of the file, or the statements outside of functions.
#[derive(Debug)]
pub struct Scope<'a> {
    /// The definition; `None` for the module.
    pub function: Option<&'a Function>,
    /// Its statements.
    pub body: &'a [Stmt],
    /// The class that defines it.
    pub class: Option<&'a str>,
    /// The scope around it.
    pub parent: usize,
    /// How it runs.
    pub mode: Mode,
    /// The values that are assigned to each name, in the order of the text, with the index of this scope.
    pub assigned: BTreeMap<String, Values<'a>>,
}

/// A parsed file with its scopes; the first is the module.
#[derive(Debug)]
pub struct Module<'a> {
    /// What its names stand for.
    pub names: Names,
    /// Functions and the module.
    pub scopes: Vec<Scope<'a>>,
    /// Whether the file decides which code is compiled: it compiles something, or it is a program.
    pub decides_compile: bool,
    classes: BTreeMap<&'a str, &'a Class>,
    /// Methods by class and name, and functions by the scope around them and name.
    functions: BTreeMap<(Option<&'a str>, usize, &'a str), usize>,
    /// The functions of each such name; [`Module::functions`] holds the index.
    definitions: Vec<Vec<usize>>,
    /// The values of each attribute of `self`, by class, in the order of the text.
    attributes: BTreeMap<(Option<&'a str>, String), Values<'a>>,
    /// The classes of this file of which each variable may hold an instance.
    instances: BTreeMap<String, BTreeSet<&'a str>>,
}

impl<'a> Module<'a> {
    /// Lists scopes and marks those that are compiled.
    #[must_use]
    pub fn new(body: &'a [Stmt]) -> Module<'a> {
        let mut module = Module {
            names: Names::from_block(body),
            scopes: Vec::new(),
            decides_compile: false,
            classes: BTreeMap::new(),
            functions: BTreeMap::new(),
            definitions: Vec::new(),
            attributes: BTreeMap::new(),
            instances: BTreeMap::new(),
        };
        module.add_scope(None, body, None, 0);
        module.collect_attributes();
        module.find_instances();
        module.mark_compiled();
        module
    }

    fn add_scope(
        &mut self,
        function: Option<&'a Function>,
        body: &'a [Stmt],
        class: Option<&'a str>,
        parent: usize,
    ) {
        let index = self.scopes.len();
        let disabled = function.is_some_and(|f| self.names.is_compile_disabled(&f.decorators));
        let mode = if disabled { Mode::Eager } else { Mode::Unknown };
        self.scopes.push(Scope { function, body, class, parent, mode, assigned: BTreeMap::new() });
        if let Some(f) = function {
            let key = (class, if class.is_some() { 0 } else { parent }, f.name.as_str());
            let next = self.definitions.len();
            let name = *self.functions.entry(key).or_insert(next);
            if name == next {
                self.definitions.push(Vec::new());
            }
            self.definitions[name].push(index);
        }
        self.add_definitions(body, None, index);
    }

    fn collect_attributes(&mut self) {
        for (index, scope) in self.scopes.iter().enumerate() {
            let class = self.class_around(index);
            for (name, values) in scope.assigned.iter().filter(|(name, _)| name.starts_with("self.")) {
                self.attributes.entry((class, name.clone())).or_default().extend(values);
            }
        }
        for values in self.attributes.values_mut() {
            values.sort_by_key(|(_, value)| value.span);
        }
    }

    fn add_definitions(&mut self, block: &'a [Stmt], class: Option<&'a str>, scope: usize) {
        visit_statements(block, &mut |statement| match &statement.kind {
            StmtKind::Function(f) => self.add_scope(Some(f), &f.body, class, scope),
            StmtKind::Class(c) => {
                self.classes.insert(&c.name, c);
                self.add_definitions(&c.body, Some(&c.name), scope);
            }
            StmtKind::Assign(targets, value) => {
                for target in targets {
                    self.add_assignment(scope, target, value);
                }
            }
            // Of other loops, nothing is known about the single items.
            StmtKind::For(target, Expr { kind: ExprKind::Sequence(items), .. }, ..) => {
                for item in items {
                    self.add_assignment(scope, target, item);
                }
            }
            _ => {}
        });
    }

    fn add_assignment(&mut self, scope: usize, target: &'a Expr, value: &'a Expr) {
        if let (ExprKind::Sequence(targets), ExprKind::Sequence(values)) = (&target.kind, &value.kind)
            && targets.len() == values.len()
        {
            for (target, value) in targets.iter().zip(values) {
                self.add_assignment(scope, target, value);
            }
            return;
        }
        for name in target_names(target) {
            self.scopes[scope].assigned.entry(name).or_default().push((scope, value));
        }
    }

    /// Returns the first function that a name or a method stands for, seen from a scope.
    #[must_use]
    pub fn find_function(&self, path: &str, from: usize) -> Option<usize> {
        self.definitions[self.find_definitions(path, from)?].first().copied()
    }

    /// Returns the index of the definitions of a name, which may be defined again.
    fn find_definitions(&self, path: &str, from: usize) -> Option<usize> {
        let scope = &self.scopes[from];
        let found = |class: &str, name: &str| self.functions.get(&(Some(class), 0, name)).copied();
        if let Some(method) = path.strip_prefix("self.") {
            let class = self.classes.get(self.class_around(from)?)?;
            let bases = class.bases.iter().filter_map(Expr::to_dotted);
            let classes = std::iter::once(class.name.clone()).chain(bases);
            return classes.into_iter().find_map(|c| found(&c, method));
        }
        if let Some((object, method)) = path.rsplit_once('.') {
            let class = self.instances.get(object).and_then(|c| c.first().copied());
            let class = class.or(self.classes.get(object).map(|c| &*c.name))?;
            return found(class, method);
        }
        let local = self.functions.get(&(None, from, path)).copied();
        local.or_else(|| (from != 0).then(|| self.find_definitions(path, scope.parent)).flatten())
    }

    /// Returns the functions that are defined directly in a scope.
    pub fn inner_scopes(&self, scope: usize) -> impl Iterator<Item = usize> + '_ {
        // A scope is listed before those inside it, and these before the next one.
        (scope + 1..self.scopes.len())
            .take_while(move |s| self.scopes[*s].parent >= scope)
            .filter(move |s| self.scopes[*s].parent == scope)
    }

    fn class_around(&self, scope: usize) -> Option<&'a str> {
        let s = &self.scopes[scope];
        s.class.or_else(|| (scope != 0).then(|| self.class_around(s.parent)).flatten())
    }

    /// Returns all values that are assigned to a name as a scope sees it, each with the scope of its
    /// names. Attributes of `self` come from all methods of the class.
    #[must_use]
    pub fn values_of(&self, name: &str, scope: usize) -> &[(usize, &'a Expr)] {
        if name.starts_with("self.") {
            let values = self.attributes.get(&(self.class_around(scope), name.to_string()));
            return values.map_or(&[], Vec::as_slice);
        }
        let s = &self.scopes[scope];
        match s.assigned.get(name) {
            Some(values) => values,
            None if scope == 0 || s.has_parameter(name) => &[],
            None => self.values_of(name, s.parent),
        }
    }

    fn find_instances(&mut self) {
        let mut found: BTreeMap<String, BTreeSet<&'a str>> = BTreeMap::new();
        for scope in &self.scopes {
            for (name, values) in &scope.assigned {
                for (_, value) in values {
                    let classes = self.classes_of(value, &found);
                    found.entry(name.clone()).or_default().extend(classes);
                }
            }
        }
        self.instances = found;
    }

    /// The classes of an instance: `Mlp()`, `Mlp().cuda()`, `FSDP(Mlp())`, or a variable with one.
    fn classes_of(&self, value: &Expr, known: &BTreeMap<String, BTreeSet<&'a str>>) -> Vec<&'a str> {
        let Some(call) = value.as_call() else {
            let classes = value.to_dotted().and_then(|name| known.get(&name));
            return classes.into_iter().flatten().copied().collect();
        };
        match &call.function.kind {
            ExprKind::Name(name) if self.classes.contains_key(name.as_str()) => {
                self.classes.get_key_value(name.as_str()).map(|(k, _)| *k).into_iter().collect()
            }
            ExprKind::Attribute(object, _) if object.as_call().is_some() => self.classes_of(object, known),
            _ => call.positional.first().map(|first| self.classes_of(first, known)).unwrap_or_default(),
        }
    }

    fn mark_compiled(&mut self) {
        let (mut functions, mut names): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        let mut classes: Vec<&'a str> = Vec::new();
        let (mut decides, mut unknown) = (false, false);
        for (index, scope) in self.scopes.iter().enumerate() {
            if scope.function.is_some_and(|f| f.decorators.iter().any(|d| self.names.is_compile(d))) {
                functions.push(index);
            }
            decides |= scope.mode == Mode::Eager;
            visit_expressions(scope.body, &mut |e| {
                let Some(call) = e.as_call() else { return };
                let path = self.names.resolve_called(call);
                decides |= path == "torch.distributed.init_process_group";
                let compiled = match (&call.function.kind, self.names.is_compile(&call.function)) {
                    (_, true) => call.find_argument("model", 0),
                    (ExprKind::Attribute(object, method), _) if method == "compile" => Some(&**object),
                    _ => None,
                };
                let Some(compiled) = compiled else { return };
                let path = compiled.to_dotted().unwrap_or_default();
                let found = self.find_definitions(&path, index);
                let instances = self.classes_of(compiled, &self.instances);
                // A function under a name that is assigned, too, may be another one.
                let is_known = found.is_some() && self.values_of(&path, index).is_empty();
                unknown |= !is_known && instances.is_empty() && self.names.is_compile(&call.function);
                names.extend(found);
                classes.extend(instances);
            });
        }
        // What is compiled under an unknown name may be any function of this file.
        self.decides_compile =
            !unknown && (decides || !functions.is_empty() || !names.is_empty() || !classes.is_empty());
        self.spread_compiled(functions, names, classes);
    }

    /// Marks what compiled functions and classes call, unless it is kept out.
    fn spread_compiled(
        &mut self,
        mut functions: Vec<usize>,
        mut names: Vec<usize>,
        mut classes: Vec<&'a str>,
    ) {
        let (mut seen, mut seen_names) = (BTreeSet::new(), BTreeSet::new());
        loop {
            while let Some(class) = classes.pop() {
                if !seen.insert(class) {
                    continue;
                }
                for (index, scope) in self.scopes.iter().enumerate() {
                    let name = scope.function.map(|f| f.name.as_str());
                    if scope.class != Some(class) {
                        continue;
                    }
                    if name == Some("forward") || name == Some("__call__") {
                        functions.push(index);
                    }
                    if name == Some("__init__") {
                        visit_expressions(scope.body, &mut |e| {
                            if e.as_call().is_some() {
                                classes.extend(self.classes_of(e, &self.instances));
                            }
                        });
                    }
                }
            }
            while let Some(name) = names.pop() {
                if seen_names.insert(name) {
                    functions.extend(&self.definitions[name]);
                }
            }
            let Some(index) = functions.pop() else { return };
            if self.scopes[index].mode != Mode::Unknown {
                continue;
            }
            self.scopes[index].mode = Mode::Compiled;
            visit_expressions(self.scopes[index].body, &mut |e| {
                let path = e.as_call().and_then(|c| c.function.to_dotted());
                names.extend(path.and_then(|p| self.find_definitions(&p, index)));
            });
        }
    }
}

impl Scope<'_> {
    /// Returns whether the function has a parameter of this name.
    #[must_use]
    pub fn has_parameter(&self, name: &str) -> bool {
        self.function.is_some_and(|f| f.parameters.iter().any(|(n, _)| n == name))
    }
}

/// Returns the names and attributes that a target of an assignment binds.
#[must_use]
pub fn target_names(target: &Expr) -> Vec<String> {
    match &target.kind {
        ExprKind::Sequence(parts) => parts.iter().flat_map(target_names).collect(),
        ExprKind::Subscript(..) => Vec::new(),
        _ => target.to_dotted().into_iter().collect(),
    }
}

/// Visits every expression of a block and of the blocks inside it.
pub fn visit_expressions<'a>(block: &'a [Stmt], see: &mut dyn FnMut(&'a Expr)) {
    visit_statements(block, &mut |statement| {
        for e in statement.list_expressions() {
            e.visit(see);
        }
    });
}
