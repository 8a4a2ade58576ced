//! What can go wrong with stored checkpoints.

/// Why something cannot be stored, or read again.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum StoreError {
    /// The store cannot be reached, or does not answer in time; it may be tried again.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
    /// The store says no: keys, rights, room.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// An object does not hold what was written.
    #[error("{object} is damaged at byte {offset}: {why}")]
    Damaged {
        /// Its name below the store's place.
        object: String,
        /// Where.
        offset: u64,
        /// What is wrong.
        why: String,
    },
    /// An object is not there.
    #[error("{0} is missing from the store")]
    Missing(String),
    /// A key is wanted, or another one.
    #[error("{0}")]
    Key(String),
    /// A newer writer has taken over; whoever gets this must not write any more.
    #[error("another host stores this guest's checkpoints now (reign {0})")]
    Fenced(u64),
    /// There is no such guest or checkpoint.
    #[error("{0}")]
    NotFound(String),
    /// The store's address makes no sense.
    #[error("{0}")]
    Address(String),
    /// This host's own disk.
    #[error("{0}")]
    Local(String),
    /// A test ends the writer here.
    #[error("killed at {0}")]
    Killed(&'static str),
}

impl StoreError {
    /// Something is wrong with the bytes of an object.
    pub(crate) fn damaged(object: &str, offset: u64, why: impl Into<String>) -> Self {
        Self::Damaged { object: object.to_owned(), offset, why: why.into() }
    }

    /// This host's disk fails.
    pub(crate) fn local(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |error| Self::Local(format!("{what}: {error}"))
    }
}

/// What this crate returns.
pub type StoreResult<T> = Result<T, StoreError>;
