//! Bytes that several can hold without copying them.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A piece of a buffer that is shared by all its pieces.
#[derive(Clone)]
pub struct SharedBytes {
    whole: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl SharedBytes {
    /// The bytes of `whole` in `range`; `None` if that does not lie in it.
    #[must_use]
    pub fn of(whole: &Arc<Vec<u8>>, range: Range<usize>) -> Option<Self> {
        whole.get(range.clone())?;
        Some(Self { whole: whole.clone(), range })
    }

    /// A part of them.
    ///
    /// # Panics
    /// If `range` does not lie in them.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?}");
        let (from, to) = (self.range.start + range.start, self.range.start + range.end);
        Self { whole: self.whole.clone(), range: from..to }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.whole[self.range.clone()]
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { whole: Arc::new(bytes), range }
    }
}

impl PartialEq for SharedBytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for SharedBytes {}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_parts_are_where_they_were() {
        let whole = Arc::new((0..100).collect::<Vec<u8>>());
        let piece = SharedBytes::of(&whole, 20..60).unwrap();
        assert_eq!(*piece.part(5..10), [25, 26, 27, 28, 29]);
        assert_eq!(piece.part(5..10).part(1..3), vec![26, 27].into());
        assert!(SharedBytes::of(&whole, 60..101).is_none());
        assert!(std::panic::catch_unwind(|| piece.part(30..41)).is_err());
    }
}
