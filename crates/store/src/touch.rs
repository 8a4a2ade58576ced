//! Touch sets beside the checkpoints: what the program of a reign touched, as last seen.

use hotspare_image::touch::TouchSet;

use crate::error::{StoreError, StoreResult};
use crate::manifest::{envelope, open_envelope};
use crate::reader::Store;
use crate::writer::folder;

fn object(guest: &str, reign: u64) -> String {
    format!("{}/touched/{reign:06}", folder(guest))
}

impl Store {
    /// Replaces what is known of a reign.
    pub fn put_touches(&self, guest: &str, reign: u64, touched: &TouchSet) -> StoreResult<()> {
        let name = object(guest, reign);
        let bytes = envelope(&touched.to_bytes(), &name, self.key())?;
        self.bucket().put(&name, bytes)
    }

    /// What is known of a reign; nothing if nobody looked.
    pub fn touches(&self, guest: &str, reign: u64) -> StoreResult<TouchSet> {
        let name = object(guest, reign);
        let bytes = match self.bucket().get(&name) {
            Ok(bytes) => bytes,
            Err(StoreError::Missing(_)) => return Ok(TouchSet::default()),
            Err(error) => return Err(error),
        };
        let raw = open_envelope(&bytes, &name, self.key())?;
        TouchSet::from_bytes(&raw).map_err(|error| StoreError::damaged(&name, 0, error.to_string()))
    }
}
