//! Where images live: checkpoints as objects in a directory or an S3-compatible store.
//!
//! A checkpoint is some *packs* of bytes and one *manifest*, written last: what has a manifest is
//! whole. `docs/formats/store.md` has the bytes.
#![forbid(unsafe_code)]

mod ahead;
mod bucket;
mod by_place;
mod chain;
mod error;
pub mod extents;
mod fold;
pub mod fuzz;
mod gather;
mod manifest;
mod names;
mod nearby;
pub mod pages;
mod reader;
mod retention;
mod seal;
mod touch;
mod writer;

pub use bucket::{Address, Bucket, Listed, Parts, Requests};
pub use error::{StoreError, StoreResult};
pub use gather::{Batch, Gatherer};
pub use manifest::{About, Host, Manifest, PageRun};
pub use names::{Base, Name};
pub use nearby::{PackMemory, PackSource};
pub use reader::{Catalogue, Known, Loaded, Reign, Store};
pub use retention::Keep;
pub use seal::Key;
pub use writer::{AtPoint, Point, Stored, Writer};
