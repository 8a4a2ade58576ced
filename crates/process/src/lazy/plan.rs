//! What comes before the guest runs, and in which order the rest follows.

use hotspare_image::source::Span;

/// In which order memory comes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Before the guest runs.
    pub first: Vec<Span>,
    /// Behind it, before everything else.
    pub then: Vec<Span>,
}
