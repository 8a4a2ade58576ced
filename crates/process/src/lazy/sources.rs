//! Several places where the pages of one checkpoint can be had.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hotspare_image::source::{Block, PageSource, SourceError, Span};

/// The same checkpoint in several places: a peer's memory, a directory, S3. Who fails is replaced
/// by the next; only if all fail there is nothing.
pub struct Sources {
    all: Vec<Arc<dyn PageSource>>,
    /// The one that was good last.
    good: AtomicUsize,
}

impl Sources {
    /// Those that are asked, the best first.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn new(all: Vec<Arc<dyn PageSource>>) -> Self {
        assert!(!all.is_empty(), "pages come from somewhere");
        Self { all, good: AtomicUsize::new(0) }
    }
}

impl PageSource for Sources {
    fn read(&self, wanted: &[Span]) -> Result<Vec<Block>, SourceError> {
        let begin = self.good.load(Ordering::Relaxed);
        let mut failed = Vec::new();
        let count = self.all.len();
        for index in (begin..begin + count).map(|index| index % count) {
            match self.all[index].read(wanted) {
                Ok(blocks) => {
                    self.good.store(index, Ordering::Relaxed);
                    return Ok(blocks);
                }
                Err(error) => {
                    tracing::warn!(%error, "another source of pages is asked");
                    failed.push(error);
                }
            }
        }
        let damaged = failed.iter().any(|error| matches!(error, SourceError::Damaged(_)));
        let [only] = &failed[..] else {
            let all = failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            return Err(if damaged { SourceError::Damaged(all) } else { SourceError::Gone(all) });
        };
        Err(only.clone())
    }

    fn whole(&self, wanted: &[Span]) -> Vec<Span> {
        self.all[self.good.load(Ordering::Relaxed)].whole(wanted)
    }

    fn all(&self) -> Vec<Span> {
        self.all[self.good.load(Ordering::Relaxed)].all()
    }
}
