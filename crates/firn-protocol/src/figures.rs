//! Figures: the numbers, yes-or-noes and states of a status, each with its name, kind, unit and help.
//!
//! `part!` declares a part of a status, a line for each field. The struct, its JSON, the
//! metrics, the figures of `firn status` and docs/METRICS.md come from that line, so none of them can lack a figure.
//!
//! A figure has the name of its field in JSON, after the prefix of its part; a metric has `firn_` before that, and
//! `_total` after it if it is a counter. The unit is last in the name.

use std::collections::BTreeMap;

use firn_format::histogram::HistogramCounts;
use serde::{Deserialize, Serialize};

/// How a figure moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, from 0 at the attach.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Observations, counted by how large they are.
    Histogram,
}

/// What a figure counts, by the end of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// `_bytes_per_second`.
    BytesPerSecond,
    /// `_bytes`.
    Bytes,
    /// `_seconds`.
    Seconds,
    /// Anything that is counted; a yes is 1.
    Count,
}

impl Unit {
    /// The unit of a figure.
    pub fn of(name: &str) -> Self {
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

/// What tells one sample of a figure from another: keys and values.
pub type Labels = Vec<(&'static str, String)>;

/// The value of a sample.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Of a counter or a gauge, in the figure's unit; a yes is 1.
    Number(f64),
    /// A histogram.
    Histogram(HistogramStatus),
}

impl Value {
    /// Whether there is nothing to tell.
    pub fn is_zero(&self) -> bool {
        match self {
            Self::Number(number) => *number == 0.0,
            Self::Histogram(histogram) => histogram.count() == 0,
        }
    }
}

/// Observations since the attach, counted by how large they are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistogramStatus {
    /// Upper bounds in ascending order, in the unit of the figure.
    pub bounds: Vec<f64>,
    /// Observations at each bound, not added up; one more for those above the last bound.
    pub counts: Vec<u64>,
    /// Of all observations, in the unit of the figure.
    pub sum: f64,
}

impl HistogramStatus {
    /// How many observations there are.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Mean of all observations; None without any.
    pub fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum / count as f64)
    }

    /// Each upper bound with the observations at it; the last one is infinite.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().copied())
    }

    /// The bound that this share of the observations does not exceed; none: there are none. `f64::INFINITY`: it is above
    /// the last bound.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = (self.count() as f64 * share).ceil().max(1.0);
        let mut seen = 0u64;
        self.buckets().find_map(|(bound, count)| {
            seen = seen.saturating_add(count);
            (seen as f64 >= wanted).then_some(bound)
        })
    }
}

impl From<HistogramCounts> for HistogramStatus {
    fn from(counted: HistogramCounts) -> Self {
        let HistogramCounts {
            bounds,
            counts,
            sum,
        } = counted;
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
    /// Different from those of every other sample of the figure.
    pub labels: Labels,
    /// What it says.
    pub value: Value,
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Name without `firn_` and `_total`.
    pub name: String,
    /// Where its value is in `firn status --json`, as `jq` writes it.
    pub json: String,
    /// How it moves.
    pub kind: Kind,
    /// What it says, in a sentence.
    pub help: String,
    /// Its values; none where the status has none.
    pub samples: Vec<Sample>,
}

/// Figures by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures(BTreeMap<String, Figure>);

impl Figures {
    /// All figures that a `T` may have, with the values of `all`.
    pub fn of<'a, T: Field + 'a>(all: impl IntoIterator<Item = &'a T>) -> Self {
        let mut figures = Self::default();
        let top = Place::default();
        T::put(None, &top, &mut figures);
        for one in all {
            T::put(Some(one), &top, &mut figures);
        }
        figures
    }

    /// With those of other things, which have none of the same name.
    #[must_use]
    pub fn with(mut self, others: Self) -> Self {
        for (name, figure) in others.0 {
            let before = self.0.insert(name, figure);
            debug_assert!(before.is_none(), "two figures of one name");
        }
        self
    }

    /// In the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &Figure> {
        self.0.values()
    }

    /// Declares the figure of a place, and adds a sample if there is a value.
    fn put(&mut self, place: &Place, value: Option<Value>) {
        let figure = self.0.entry(place.name.clone()).or_insert_with(|| Figure {
            name: place.name.clone(),
            json: place.json.clone(),
            kind: place.kind,
            help: place.help.trim().to_owned(),
            samples: Vec::new(),
        });
        debug_assert_eq!(figure.json, place.json, "two figures called {}", place.name);
        figure.samples.extend(value.map(|value| Sample {
            labels: place.labels.clone(),
            value,
        }));
    }
}

/// Where a field is: what its figure is called, and the labels of its samples.
#[derive(Clone, Debug)]
pub struct Place {
    prefix: String,
    name: String,
    json: String,
    kind: Kind,
    help: &'static str,
    labels: Labels,
}

impl Default for Place {
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

impl Place {
    /// The place of a part that has fields of its own.
    pub fn part(&self, prefix: &str) -> Self {
        let prefix = format!("{}{prefix}", self.prefix);
        Self {
            prefix,
            ..self.clone()
        }
    }

    /// A field of this part.
    pub fn field(&self, name: &str, kind: Kind, help: &'static str) -> Self {
        Self {
            name: format!("{}{name}", self.prefix),
            json: format!("{}.{name}", self.json),
            kind,
            help,
            ..self.clone()
        }
    }

    /// With a label more.
    pub fn label(&self, key: &'static str, value: impl ToString) -> Self {
        let mut place = self.clone();
        place.labels.push((key, value.to_string()));
        place
    }
}

/// What a field with figures can be.
pub trait Field: Sized {
    /// Declares the figures of a field, and adds their values if there is one.
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures);
}

/// A part of a status, made by `part!`.
pub trait Part: Field {
    /// The label with the number of one of several; none: other labels tell them apart.
    const NUMBERED: Option<&'static str>;
}

/// A number, or a yes or no.
pub trait Number: Copy {
    /// A yes is 1.
    fn number(self) -> f64;
}

impl Number for u32 {
    fn number(self) -> f64 {
        self.into()
    }
}

impl Number for u64 {
    /// Exact up to 8 PiB.
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

impl<N: Number> Field for N {
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures) {
        figures.put(place, value.map(|value| Value::Number(value.number())));
    }
}

/// No value where there is none.
impl<F: Field> Field for Option<F> {
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures) {
        F::put(value.and_then(Option::as_ref), place, figures);
    }
}

impl Field for HistogramStatus {
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures) {
        figures.put(place, value.cloned().map(Value::Histogram));
    }
}

/// Each count has its key as the label `kind`.
impl Field for BTreeMap<String, u64> {
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures) {
        figures.put(place, None);
        for (kind, count) in value.into_iter().flatten() {
            let count = Value::Number(count.number());
            figures.put(&place.label("kind", kind), Some(count));
        }
    }
}

/// How many sentences there are.
impl Field for Vec<String> {
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures) {
        figures.put(
            place,
            value.map(|sentences| Value::Number(sentences.len() as f64)),
        );
    }
}

/// How many parts there are, and the figures of each.
impl<P: Part> Field for Vec<P> {
    fn put(value: Option<&Self>, place: &Place, figures: &mut Figures) {
        figures.put(place, value.map(|parts| Value::Number(parts.len() as f64)));
        let mut each = place.clone();
        each.json += "[]";
        P::put(None, &each, figures);
        for (number, part) in value.into_iter().flatten().enumerate() {
            let one = match P::NUMBERED {
                Some(key) => each.label(key, number),
                None => each.clone(),
            };
            P::put(Some(part), &one, figures);
        }
    }
}

/// Declares a part of a status: a struct with JSON whose fields have a kind before their names.
///
/// | kind | the field |
/// |---|---|
/// | `counter` | only grows |
/// | `gauge` | goes up and down; a yes or no, a state, or sentences that are counted |
/// | `histogram` | counts observations by how large they are |
/// | `part` | has figures of its own |
/// | `label` | tells the samples of this part from those of others |
/// | `text` | is for JSON and people only |
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

        impl $crate::figures::Part for $name {
            const NUMBERED: Option<&'static str> = [$(Some($number),)? None][0];
        }

        impl $crate::figures::Field for $name {
            fn put(
                part: Option<&Self>,
                place: &$crate::figures::Place,
                figures: &mut $crate::figures::Figures,
            ) {
                let place = place.part($prefix);
                $( part!(@label $kind $field, part, place); )*
                $( part!(@figure $kind $field: $type, concat!($($help),*), part, place, figures); )*
            }
        }
    };
    (@label label $field:ident, $part:ident, $place:ident) => {
        let $place = match $part {
            Some(part) => $place.label(stringify!($field), &part.$field),
            None => $place,
        };
    };
    (@label $other:ident $field:ident, $part:ident, $place:ident) => {};
    (@figure text $($rest:tt)*) => {};
    (@figure label $($rest:tt)*) => {};
    (@figure counter $($rest:tt)*) => { part!(@put Counter, $($rest)*) };
    (@figure gauge $($rest:tt)*) => { part!(@put Gauge, $($rest)*) };
    (@figure histogram $($rest:tt)*) => { part!(@put Histogram, $($rest)*) };
    (@figure part $($rest:tt)*) => { part!(@put Gauge, $($rest)*) };
    (@put $kind:ident, $field:ident: $type:ty, $help:expr, $part:ident, $place:ident, $figures:ident) => {
        <$type as $crate::figures::Field>::put(
            $part.map(|part| &part.$field),
            &$place.field(stringify!($field), $crate::figures::Kind::$kind, $help),
            $figures,
        )
    };
}
pub(crate) use part;

/// Declares the states of a field, each with its word. Its figure has a sample for each word as the label `state`: 1 for
/// the one that is, 0 for the others.
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
            /// The word for it.
            pub fn as_str(self) -> &'static str {
                match self {
                    $( Self::$state => $word, )*
                }
            }
        }

        impl $crate::figures::Field for $name {
            fn put(
                state: Option<&Self>,
                place: &$crate::figures::Place,
                figures: &mut $crate::figures::Figures,
            ) {
                $(
                    let is_now = state.map(|state| *state == Self::$state);
                    bool::put(is_now.as_ref(), &place.label("state", $word), figures);
                )*
            }
        }
    };
}
pub(crate) use states;
