//! The y axis: from 0, or logarithmic where the figures differ too much for that.

use super::{line, text};
use firn_bench::report::figure;

const GRID: &str = "#dddddd";
/// Largest over smallest figure; above, the small ones would lie on the floor. Bars tell best from 0.
const LINEAR_MAX: f64 = 30.0;
const LINEAR_MAX_BARS: f64 = 300.0;

/// Where figures lie between the floor and the ceiling of a panel.
pub(super) struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Axis {
    /// For these figures.
    pub(super) fn of(figures: &[f64], bars: bool) -> Self {
        let positive = || figures.iter().copied().filter(|v| *v > 0.0);
        let high = positive().fold(0.0, f64::max);
        let low = positive().fold(f64::INFINITY, f64::min);
        let most = if bars { LINEAR_MAX_BARS } else { LINEAR_MAX };
        if high > 0.0 && high / low > most {
            let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
            let ticks: Vec<f64> = decades.map(|power| 10f64.powi(power)).collect();
            return Self {
                low: ticks[0],
                high: ticks[ticks.len() - 1],
                logarithmic: true,
                ticks,
            };
        }
        let step = step(high.max(f64::MIN_POSITIVE));
        let count = if high > 0.0 {
            (high / step).ceil() as u32
        } else {
            1
        };
        let ticks: Vec<f64> = (0..=count).map(|n| f64::from(n) * step).collect();
        Self {
            low: 0.0,
            high: f64::from(count) * step,
            logarithmic: false,
            ticks,
        }
    }

    /// Share of the height at which a figure lies.
    pub(super) fn share(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value / self.low).log10() / (self.high / self.low).log10()
        } else {
            value / self.high
        };
        if share.is_finite() {
            share.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// Ticks with their figures, left of `left`, and lines to `right`.
    pub(super) fn draw(
        &self,
        out: &mut String,
        (left, right): (f64, f64),
        (floor, height): (f64, f64),
    ) {
        for tick in &self.ticks {
            let y = floor - height * self.share(*tick);
            line(out, (left, y), (right, y), GRID);
            text(out, left - 5.0, y + 3.5, "end", 10, &label(*tick));
        }
    }
}

/// A round number of which four to ten make `high`.
fn step(high: f64) -> f64 {
    let unit = 10f64.powf((high / 4.0).log10().floor());
    let fits = [5.0, 2.0, 1.0]
        .into_iter()
        .find(|n| n * unit * 4.0 <= high * 1.000_001);
    fits.unwrap_or(1.0) * unit
}

fn label(tick: f64) -> String {
    match tick {
        t if t >= 1e9 => format!("{}G", figure(t / 1e9).trim_end_matches(".00")),
        t if t >= 1e6 => format!("{}M", figure(t / 1e6).trim_end_matches(".00")),
        t if t >= 1000.0 => format!("{}k", (t / 1000.0 * 10.0).round() / 10.0),
        // As many digits as it has, without those of binary fractions.
        t => format!("{}", (t * 1e6).round() / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_four_to_ten_reach_the_top() {
        for (high, wanted) in [
            (1.0, 0.2),
            (8.0, 2.0),
            (10.0, 2.0),
            (13.0, 2.0),
            (20.1, 5.0),
            (0.03, 0.005),
        ] {
            assert!((step(high) - wanted).abs() < 1e-9, "{high}: {}", step(high));
        }
        for high in [0.7, 3.3, 41.0, 999.0] {
            let count = high / step(high);
            assert!((4.0..=10.1).contains(&count), "{high}: {count}");
        }
    }

    #[test]
    fn figures_far_apart_are_shown_by_their_decades() {
        let axis = Axis::of(&[0.05, 12.0], false);
        assert!((axis.share(0.01), axis.share(100.0)) == (0.0, 1.0));
        assert!(axis.share(1.0) > 0.49 && axis.share(1.0) < 0.51);
        assert_eq!(axis.share(0.0), 0.0);
    }
}
