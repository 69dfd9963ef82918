//! The two fields of one rank and the step that advances them.
//!
//! Invariants
//! * A field has `planes + 2` planes of `size × size` cells; the first and the last are copies of
//!   the neighbours' (or, with one rank, of its own) boundary planes.
//! * A cell after a step depends only on its six neighbours before it, and additions happen in one
//!   order: so the result does not depend on how the cube is cut.

use xxhash_rust::xxh3::Xxh3Default;

/// Spread of heat a step; below 1/6 the explicit scheme is stable.
const HEAT_SPREAD: f64 = 0.10;
/// Spread of fuel a step.
const FUEL_SPREAD: f64 = 0.02;
/// Share of the fuel burnt a step at temperature 1; temperature counts squared.
const BURN: f64 = 0.40;
/// Share of the heat lost a step.
const LOSS: f64 = 0.001;

/// The slab of one rank.
pub struct Slab {
    /// Cells along an edge of the cube.
    pub size: usize,
    /// First plane of the cube that is ours.
    pub first: usize,
    /// How many are.
    pub planes: usize,
    /// Temperature, with ghost planes.
    pub heat: Vec<f64>,
    /// Fuel, with ghost planes.
    pub fuel: Vec<f64>,
    next_heat: Vec<f64>,
    next_fuel: Vec<f64>,
}

impl Slab {
    /// Rank `rank` of `ranks` in a cube of `size`: fuel with a little noise, lit in a few places.
    pub fn new(rank: u32, ranks: u32, size: u32) -> Slab {
        let size = size as usize;
        let ranks = ranks as usize;
        let rank = rank as usize;
        let first = rank * size / ranks;
        let planes = (rank + 1) * size / ranks - first;
        let cells = (planes + 2) * size * size;
        let mut slab = Slab {
            size,
            first,
            planes,
            heat: vec![0.0; cells],
            fuel: vec![0.0; cells],
            next_heat: vec![0.0; cells],
            next_fuel: vec![0.0; cells],
        };
        slab.ignite();
        slab
    }

    /// Cells of one plane.
    pub fn plane_cells(&self) -> usize {
        self.size * self.size
    }

    /// Range of our plane `plane` (0 is the first that is ours) in a field.
    pub fn plane(&self, plane: usize) -> std::ops::Range<usize> {
        let begin = (plane + 1) * self.plane_cells();
        begin..begin + self.plane_cells()
    }

    fn ignite(&mut self) {
        let size = self.size;
        let sparks: Vec<[usize; 3]> = (0..5)
            .map(|spark| [0, 1, 2].map(|axis| mix(spark * 3 + axis) as usize % size))
            .collect();
        let radius = (size / 8).max(1) as isize;
        for plane in 0..self.planes {
            let z = self.first + plane;
            for (index, cell) in self.plane(plane).enumerate() {
                let at = [index % size, index / size, z];
                let noise = mix((z * size * size + index) as u64 + 1000) >> 11;
                self.fuel[cell] = 0.9 + 0.2 * noise as f64 / (1u64 << 53) as f64;
                if sparks
                    .iter()
                    .any(|spark| distance_squared(spark, &at, size) <= radius * radius)
                {
                    self.heat[cell] = 1.0;
                }
            }
        }
    }

    /// One step; the ghost planes must be those of the neighbours.
    pub fn step(&mut self) {
        let size = self.size;
        let area = self.plane_cells();
        for plane in 1..=self.planes {
            for y in 0..size {
                let row = plane * area + y * size;
                let up = plane * area + (y + 1) % size * size;
                let down = plane * area + (y + size - 1) % size * size;
                for x in 0..size {
                    let here = row + x;
                    let left = if x == 0 { row + size - 1 } else { here - 1 };
                    let right = if x + 1 == size { row } else { here + 1 };
                    let around = [left, right, down + x, up + x, here - area, here + area];
                    let heat = self.heat[here];
                    let fuel = self.fuel[here];
                    let burnt = BURN * fuel * (heat * heat).min(1.0);
                    self.next_heat[here] =
                        heat + HEAT_SPREAD * excess(&self.heat, around, heat) + burnt - LOSS * heat;
                    self.next_fuel[here] =
                        fuel + FUEL_SPREAD * excess(&self.fuel, around, fuel) - burnt;
                }
            }
        }
        std::mem::swap(&mut self.heat, &mut self.next_heat);
        std::mem::swap(&mut self.fuel, &mut self.next_fuel);
    }

    /// A hash over every bit of our plane `plane`, both fields.
    pub fn plane_hash(&self, plane: usize) -> u64 {
        let mut hash = Xxh3Default::new();
        for cell in self.plane(plane) {
            hash.update(&self.heat[cell].to_ne_bytes());
            hash.update(&self.fuel[cell].to_ne_bytes());
        }
        hash.digest()
    }
}

/// What flows in from the six neighbours.
#[inline]
fn excess(field: &[f64], around: [usize; 6], here: f64) -> f64 {
    around
        .iter()
        .fold(-6.0 * here, |sum, &cell| sum + field[cell])
}

/// Square of the distance on the periodic grid.
fn distance_squared(a: &[usize; 3], b: &[usize; 3], size: usize) -> isize {
    (0..3)
        .map(|axis| {
            let straight = a[axis].abs_diff(b[axis]);
            straight.min(size - straight) as isize
        })
        .map(|along| along * along)
        .sum()
}

/// A well-mixed number for each input (SplitMix64), so that the start needs no stored seed.
fn mix(input: u64) -> u64 {
    let mut z = input.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// A hash over the hashes of all planes of a cube, in their order.
pub fn hash_of_planes(planes: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = Xxh3Default::new();
    planes
        .into_iter()
        .for_each(|plane| hash.update(&plane.to_ne_bytes()));
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Advances `ranks` slabs in this process, exchanging ghosts by copy, and hashes the cube.
    fn burn(ranks: u32, size: u32, steps: u64) -> (u64, Vec<Slab>) {
        let mut slabs: Vec<Slab> = (0..ranks)
            .map(|rank| Slab::new(rank, ranks, size))
            .collect();
        let count = slabs.len();
        for _ in 0..steps {
            for here in 0..count {
                let below = (here + count - 1) % count;
                let above = (here + 1) % count;
                let last = slabs[below].plane(slabs[below].planes - 1);
                let first = slabs[above].plane(0);
                let low = (
                    slabs[below].heat[last.clone()].to_vec(),
                    slabs[below].fuel[last].to_vec(),
                );
                let high = (
                    slabs[above].heat[first.clone()].to_vec(),
                    slabs[above].fuel[first].to_vec(),
                );
                let area = slabs[here].plane_cells();
                let end = (slabs[here].planes + 1) * area;
                slabs[here].heat[..area].copy_from_slice(&low.0);
                slabs[here].fuel[..area].copy_from_slice(&low.1);
                slabs[here].heat[end..].copy_from_slice(&high.0);
                slabs[here].fuel[end..].copy_from_slice(&high.1);
            }
            slabs.iter_mut().for_each(Slab::step);
        }
        let planes = slabs
            .iter()
            .flat_map(|slab| (0..slab.planes).map(|plane| slab.plane_hash(plane)));
        (hash_of_planes(planes), slabs)
    }

    #[test]
    fn the_result_does_not_depend_on_how_the_cube_is_cut() {
        let whole = burn(1, 20, 15).0;
        assert_eq!(whole, burn(3, 20, 15).0);
        assert_eq!(whole, burn(4, 20, 15).0);
    }

    #[test]
    fn the_flame_spreads_and_stays_bounded() {
        let before: f64 = burn(1, 24, 0).1[0].fuel.iter().sum();
        let slab = &burn(1, 24, 150).1[0];
        let after: f64 = (0..slab.planes)
            .flat_map(|plane| slab.plane(plane))
            .map(|cell| slab.fuel[cell])
            .sum();
        assert!(after < 0.8 * before, "fuel left: {after} of {before}");
        assert!(slab.heat.iter().all(|heat| (0.0..2.0).contains(heat)));
    }
}
