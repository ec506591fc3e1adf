//! Small random numbers that are a function of what they are for.

use tessera_base::random::philox4x32;

/// A row of draws named by a seed and two words.
#[derive(Debug, Clone)]
pub struct Dice {
    key: [u32; 2],
    name: [u32; 2],
    at: u32,
    words: [u32; 4],
}

impl Dice {
    /// The draws of a name under a seed.
    #[must_use]
    pub fn new(seed: u64, name: [u32; 2]) -> Dice {
        Dice { key: [seed as u32, (seed >> 32) as u32], name, at: 0, words: [0; 4] }
    }

    /// The next 32 bits.
    pub fn word(&mut self) -> u32 {
        let (block, lane) = (self.at / 4, self.at % 4);
        if lane == 0 {
            self.words = philox4x32([block, self.name[0], self.name[1], 0], self.key);
        }
        self.at += 1;
        self.words[lane as usize]
    }

    /// A number below `n`; 0 where `n` is.
    pub fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.word()) * n as u64) >> 32) as usize
    }

    /// True `a` times out of `b`.
    pub fn chance(&mut self, a: usize, b: usize) -> bool {
        self.below(b) < a
    }

    /// One of a list.
    ///
    /// # Panics
    /// On an empty list.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}
