//! Figures: the numbers, booleans and states in a status. Each has a name, a kind, a unit and a help text, and becomes
//! a metric for Prometheus.
//!
//! A *status* is what firnd, the process that serves a mount, reports of the mount. It is a tree of *parts* (sections),
//! each of which `part!` declares with one line for each field. The struct, its JSON, the metrics, the figures of
//! `firn status` and docs/METRICS.md all come from that line, so none of them can lack a figure.
//!
//! Names: a figure has the prefix of its part and the name of its field in JSON, which ends with the unit. A metric has
//! `firn_` before that, and `_total` after it if it is a counter.

use std::collections::BTreeMap;

use firn_format::histogram::HistogramCounts;
use serde::{Deserialize, Serialize};

/// How a figure changes with time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The value only grows, from 0 when firnd attaches.
    Counter,
    /// The value goes up and down.
    Gauge,
    /// The figure counts observations by their size.
    Histogram,
}

/// Unit of a figure, which the end of the figure's name shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// `_bytes_per_second`.
    BytesPerSecond,
    /// `_bytes`.
    Bytes,
    /// `_seconds`.
    Seconds,
    /// A count, or a boolean as 0 or 1: any other name.
    Count,
}

impl Unit {
    /// Returns the unit of the figure `name`.
    pub fn from_figure_name(name: &str) -> Self {
        if name.ends_with("bytes_per_second") {
            Self::BytesPerSecond
        } else if name.ends_with("bytes") {
            Self::Bytes
        } else if name.ends_with("seconds") {
            Self::Seconds
        } else {
            Self::Count
        }
    }
}

/// Keys and values that distinguish the samples of a figure.
pub type Labels = Vec<(&'static str, String)>;

/// The value of a sample.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Value of a counter or a gauge, in the figure's unit; true is 1.
    Number(f64),
    /// Counts of a histogram.
    Histogram(HistogramStatus),
}

impl Value {
    /// Returns whether the number is 0, or nothing was observed.
    pub fn is_zero(&self) -> bool {
        match self {
            Self::Number(number) => *number == 0.0,
            Self::Histogram(histogram) => histogram.count() == 0,
        }
    }
}

/// Observations since firnd attached, counted by their size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistogramStatus {
    /// Upper bounds in ascending order, in the unit of the figure.
    pub bounds: Vec<f64>,
    /// Number of observations for each bound: above the previous bound and up to this bound. One more count comes last,
    /// of the observations above all bounds.
    pub counts: Vec<u64>,
    /// Sum of all observations, in the unit of the figure.
    pub sum: f64,
}

impl HistogramStatus {
    /// Returns the number of observations.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Returns the mean of all observations, or `None` if there is no observation.
    pub fn mean(&self) -> Option<f64> {
        match self.count() {
            0 => None,
            count => Some(self.sum / count as f64),
        }
    }

    /// Returns each upper bound with its count. The last bound is infinite.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        self.bounds
            .iter()
            .copied()
            .chain([f64::INFINITY])
            .zip(self.counts.iter().copied())
    }

    /// Returns the lowest bound that at least `share` of the observations do not exceed. Returns `f64::INFINITY` if no
    /// finite bound is high enough, and `None` if there is no observation.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let wanted_count = (self.count() as f64 * share).ceil().max(1.0);
        let mut count_so_far = 0u64;
        for (bound, count) in self.buckets() {
            count_so_far = count_so_far.saturating_add(count);
            if count_so_far as f64 >= wanted_count {
                return Some(bound);
            }
        }
        None
    }
}

impl From<HistogramCounts> for HistogramStatus {
    fn from(histogram: HistogramCounts) -> Self {
        let HistogramCounts {
            bounds,
            counts,
            sum,
        } = histogram;
        Self {
            bounds,
            counts,
            sum,
        }
    }
}

/// One value of a figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Labels. No two samples of a figure have the same labels.
    pub labels: Labels,
    /// Value of the sample.
    pub value: Value,
}

/// A figure and its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Name without `firn_` and `_total`.
    pub name: String,
    /// Path of the figure's value in `firn status --json`, in the notation of `jq`.
    pub json: String,
    /// How the figure changes with time.
    pub kind: Kind,
    /// Meaning of the figure, in a sentence.
    pub help: String,
    /// Values of the figure; empty if the status has none.
    pub samples: Vec<Sample>,
}

/// Figures by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures(BTreeMap<String, Figure>);

impl Figures {
    /// Returns all figures that a status of type `T` can have, with the values of `statuses`.
    pub fn from_statuses<'a, T: StatusField + 'a>(
        statuses: impl IntoIterator<Item = &'a T>,
    ) -> Self {
        let mut figures = Self::default();
        let top = FieldContext::default();
        // Without a value, figures that no status has are declared too.
        T::add_figures(None, &top, &mut figures);
        for status in statuses {
            T::add_figures(Some(status), &top, &mut figures);
        }
        figures
    }

    /// Adds the figures of `others`. Their names must differ from the names that this has already.
    #[must_use]
    pub fn with(mut self, others: Self) -> Self {
        for (name, figure) in others.0 {
            let previous = self.0.insert(name, figure);
            debug_assert!(previous.is_none(), "two figures of one name");
        }
        self
    }

    /// Returns the figures in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &Figure> {
        self.0.values()
    }

    /// Declares the figure (metric) of a field of the status, and adds a sample if there is a value. For a list of
    /// parts it is called once for each part: the figure then has a sample for each of them, with different labels.
    fn add_sample(&mut self, context: &FieldContext, value: Option<Value>) {
        let figure = self
            .0
            .entry(context.name.clone())
            .or_insert_with(|| Figure {
                name: context.name.clone(),
                json: context.json.clone(),
                kind: context.kind,
                help: context.help.trim().to_owned(),
                samples: Vec::new(),
            });
        debug_assert_eq!(
            figure.json, context.json,
            "two figures called {}",
            context.name
        );
        if let Some(value) = value {
            figure.samples.push(Sample {
                labels: context.labels.clone(),
                value,
            });
        }
    }
}

/// What is known of a field of a status before its value: the name of its figure, and the labels of its samples.
#[derive(Clone, Debug)]
pub struct FieldContext {
    /// Prefix of the figure's name: those of all parts around the field.
    prefix: String,
    /// Name of the figure.
    name: String,
    /// Path of the field in the JSON of the status.
    json: String,
    /// Kind of the figure.
    kind: Kind,
    /// Help text of the figure.
    help: &'static str,
    /// Labels of the samples.
    labels: Labels,
}

impl Default for FieldContext {
    fn default() -> Self {
        Self {
            prefix: String::new(),
            name: String::new(),
            json: String::new(),
            kind: Kind::Gauge,
            help: "",
            labels: Labels::new(),
        }
    }
}

impl FieldContext {
    /// Returns the context of the fields of a part. Their names get `prefix`.
    pub fn in_part(&self, prefix: &str) -> Self {
        let prefix = format!("{}{prefix}", self.prefix);
        Self {
            prefix,
            ..self.clone()
        }
    }

    /// Returns the context of a field of this part. `help` says what the field means.
    pub fn for_field(&self, name: &str, kind: Kind, help: &'static str) -> Self {
        Self {
            name: format!("{}{name}", self.prefix),
            json: format!("{}.{name}", self.json),
            kind,
            help,
            ..self.clone()
        }
    }

    /// Returns the same context with one more label for the samples.
    pub fn with_label(&self, key: &'static str, value: impl ToString) -> Self {
        let mut labelled = self.clone();
        labelled.labels.push((key, value.to_string()));
        labelled
    }
}

/// Type of a field that has figures.
pub trait StatusField: Sized {
    /// Declares the figures (metrics) of a field, and adds their samples. Without a value it only declares them, so
    /// that they are listed even if no status has a value.
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures);
}

/// A part of a status that `part!` declares.
pub trait StatusPart: StatusField {
    /// Key of the label with the index of a part in its list. `None` means that other labels distinguish the parts.
    const INDEX_LABEL: Option<&'static str>;
}

/// Type of a number or a boolean.
pub trait Number: Copy {
    /// Returns the value as a number; true is 1.
    fn number(self) -> f64;
}

impl Number for u32 {
    fn number(self) -> f64 {
        self.into()
    }
}

impl Number for u64 {
    /// Exact for values up to 2^53.
    fn number(self) -> f64 {
        self as f64
    }
}

impl Number for f64 {
    fn number(self) -> f64 {
        self
    }
}

impl Number for bool {
    fn number(self) -> f64 {
        self.into()
    }
}

impl<N: Number> StatusField for N {
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures) {
        figures.add_sample(context, value.map(|value| Value::Number(value.number())));
    }
}

/// A missing value declares the figures and adds no sample.
impl<F: StatusField> StatusField for Option<F> {
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures) {
        F::add_figures(value.and_then(Option::as_ref), context, figures);
    }
}

impl StatusField for HistogramStatus {
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures) {
        figures.add_sample(context, value.cloned().map(Value::Histogram));
    }
}

/// Each count is a sample with its key as the label `kind`.
impl StatusField for BTreeMap<String, u64> {
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures) {
        figures.add_sample(context, None);
        for (kind, count) in value.into_iter().flatten() {
            let count = Value::Number(count.number());
            figures.add_sample(&context.with_label("kind", kind), Some(count));
        }
    }
}

/// The value is the number of sentences.
impl StatusField for Vec<String> {
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures) {
        figures.add_sample(
            context,
            value.map(|sentences| Value::Number(sentences.len() as f64)),
        );
    }
}

/// The value is the number of parts. The figures of each part follow.
impl<P: StatusPart> StatusField for Vec<P> {
    /// Declares the figures of a list of parts: its length, and the figures of a part. Adds their samples: one for the
    /// length, and one for each part, with different labels.
    fn add_figures(value: Option<&Self>, context: &FieldContext, figures: &mut Figures) {
        figures.add_sample(
            context,
            value.map(|parts| Value::Number(parts.len() as f64)),
        );
        let mut each_part = context.clone();
        each_part.json += "[]";
        // The call without a value declares the figures even if the list is empty.
        P::add_figures(None, &each_part, figures);
        for (index, part) in value.into_iter().flatten().enumerate() {
            let part_context = match P::INDEX_LABEL {
                Some(key) => each_part.with_label(key, index),
                None => each_part.clone(),
            };
            P::add_figures(Some(part), &part_context, figures);
        }
    }
}

/// Declares a part of a status: a struct with JSON. The word before a field's name is its kind.
///
/// | kind | the field |
/// |---|---|
/// | `counter` | only grows |
/// | `gauge` | goes up and down: a number, a boolean, a state, or the number of sentences |
/// | `histogram` | counts observations by their size |
/// | `part` | is a part with separate figures |
/// | `label` | is a label of all samples of this part |
/// | `text` | is in the JSON and has no figure |
macro_rules! part {
    (
        $(#[doc = $about:literal])*
        $name:ident, prefix $prefix:literal $(, numbered $number:literal)? {
            $( $(#[doc = $help:literal])* $kind:ident $field:ident: $type:ty, )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $name {
            $( $(#[doc = $help])* pub $field: $type, )*
        }

        impl $crate::figures::StatusPart for $name {
            const INDEX_LABEL: Option<&'static str> = [$(Some($number),)? None][0];
        }

        impl $crate::figures::StatusField for $name {
            fn add_figures(
                part: Option<&Self>,
                context: &$crate::figures::FieldContext,
                figures: &mut $crate::figures::Figures,
            ) {
                let context = context.in_part($prefix);
                $( part!(@label $kind $field, part, context); )*
                $( part!(@figure $kind $field: $type, concat!($($help),*), part, context, figures); )*
            }
        }
    };
    (@label label $field:ident, $part:ident, $context:ident) => {
        let $context = match $part {
            Some(part) => $context.with_label(stringify!($field), &part.$field),
            None => $context,
        };
    };
    (@label $other:ident $field:ident, $part:ident, $context:ident) => {};
    (@figure text $($rest:tt)*) => {};
    (@figure label $($rest:tt)*) => {};
    (@figure counter $($rest:tt)*) => { part!(@put Counter, $($rest)*) };
    (@figure gauge $($rest:tt)*) => { part!(@put Gauge, $($rest)*) };
    (@figure histogram $($rest:tt)*) => { part!(@put Histogram, $($rest)*) };
    (@figure part $($rest:tt)*) => { part!(@put Gauge, $($rest)*) };
    (@put $kind:ident, $field:ident: $type:ty, $help:expr, $part:ident, $context:ident, $figures:ident) => {
        <$type as $crate::figures::StatusField>::add_figures(
            $part.map(|part| &part.$field),
            &$context.for_field(stringify!($field), $crate::figures::Kind::$kind, $help),
            $figures,
        )
    };
}
pub(crate) use part;

/// Declares the states of a field, each with its word. The figure has one sample for each word, which is the label
/// `state`. The sample of the present state is 1, all others are 0.
macro_rules! states {
    (
        $(#[doc = $about:literal])*
        $name:ident { $( $(#[$meta:meta])* $state:ident = $word:literal, )* }
    ) => {
        $(#[doc = $about])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize,
        )]
        pub enum $name {
            $( $(#[$meta])* #[serde(rename = $word)] $state, )*
        }

        impl $name {
            /// Returns the word for the state.
            pub fn as_str(self) -> &'static str {
                match self {
                    $( Self::$state => $word, )*
                }
            }
        }

        impl $crate::figures::StatusField for $name {
            fn add_figures(
                state: Option<&Self>,
                context: &$crate::figures::FieldContext,
                figures: &mut $crate::figures::Figures,
            ) {
                $(
                    let is_now = state.map(|state| *state == Self::$state);
                    bool::add_figures(is_now.as_ref(), &context.with_label("state", $word), figures);
                )*
            }
        }
    };
}
pub(crate) use states;
