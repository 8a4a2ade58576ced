//! Bytes as they lie in the store: compressed, with a key encrypted, and with a hash by which a
//! changed bit is found.

use std::io::Read;
use std::path::Path;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::error::{StoreError, StoreResult};

/// Bytes of a hash of stored bytes: BLAKE3, cut.
pub const HASH_BYTES: usize = 16;
/// Bytes of nonce and tag that encryption adds.
const SEALED_BYTES: usize = NONCE_LEN + 16;
/// zstd's fastest that still pays.
const LEVEL: i32 = 1;

/// The key of encryption at rest.
#[derive(Clone)]
pub struct Key(std::sync::Arc<LessSafeKey>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Reads a file of 32 bytes, or of 64 hexadecimal digits.
    pub fn load(path: &Path) -> StoreResult<Self> {
        let key_error = |why: String| StoreError::Key(format!("{}: {why}", path.display()));
        let bytes = std::fs::read(path).map_err(|error| key_error(error.to_string()))?;
        let text = std::str::from_utf8(&bytes).map_or("", str::trim);
        let digits: Option<Vec<u8>> = (text.len() == 64 && text.is_ascii())
            .then(|| (0..32).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()))
            .and_then(Iterator::collect);
        let key = digits.unwrap_or(bytes);
        if key.len() != 32 {
            return Err(key_error(
                "a key is 32 bytes, or 64 hexadecimal digits: make one with `openssl rand -hex 32`"
                    .into(),
            ));
        }
        Ok(Self::of(&key.try_into().expect("32 bytes")))
    }

    /// A key of these bytes.
    pub fn of(bytes: &[u8; 32]) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, bytes).expect("32 bytes are a key");
        Self(std::sync::Arc::new(LessSafeKey::new(key)))
    }

    /// Nonces are random: with 96 bits, 2^32 blocks of one key are fine (NIST SP 800-38D, 8.3).
    fn encrypt(&self, place: &[u8], bytes: &mut Vec<u8>) -> StoreResult<()> {
        let mut nonce = [0; NONCE_LEN];
        let failed = |_| StoreError::Local("encrypt what is stored".into());
        SystemRandom::new().fill(&mut nonce).map_err(failed)?;
        let used = Nonce::assume_unique_for_key(nonce);
        self.0.seal_in_place_append_tag(used, Aad::from(place), bytes).map_err(failed)?;
        bytes.splice(0..0, nonce);
        Ok(())
    }

    fn decrypt(&self, place: &[u8], mut bytes: Vec<u8>) -> Option<Vec<u8>> {
        let sealed = bytes.split_off(NONCE_LEN.min(bytes.len()));
        let nonce = Nonce::try_assume_unique_for_key(&bytes).ok()?;
        let mut sealed = sealed;
        let length = self.0.open_in_place(nonce, Aad::from(place), &mut sealed).ok()?.len();
        sealed.truncate(length);
        Some(sealed)
    }
}

/// A hash of stored bytes.
pub fn hash(bytes: &[u8]) -> [u8; HASH_BYTES] {
    let mut cut = [0; HASH_BYTES];
    cut.copy_from_slice(&blake3::hash(bytes).as_bytes()[..HASH_BYTES]);
    cut
}

/// What encryption binds bytes to, so that they cannot be put elsewhere.
fn place(object: &str, offset: u64) -> Vec<u8> {
    [object.as_bytes(), &offset.to_le_bytes()].concat()
}

/// Packs bytes that will lie in `object` at `offset`.
pub fn pack(raw: &[u8], key: Option<&Key>, object: &str, offset: u64) -> StoreResult<Vec<u8>> {
    let compressed = zstd::bulk::compress(raw, LEVEL).map_err(StoreError::local("compress"))?;
    // As long as they are: they are what they are.
    let mut bytes = if compressed.len() < raw.len() { compressed } else { raw.to_vec() };
    if let Some(key) = key {
        key.encrypt(&place(object, offset), &mut bytes)?;
    }
    Ok(bytes)
}

/// What [`pack`] was given; `raw_bytes` is how many. The hash has been compared.
pub fn unpack(
    stored: Vec<u8>,
    key: Option<&Key>,
    encrypted: bool,
    (object, offset): (&str, u64),
    raw_bytes: usize,
) -> StoreResult<Vec<u8>> {
    let wrong = |why: &str| Err(StoreError::damaged(object, offset, why));
    let bytes = match (encrypted, key) {
        (false, _) => stored,
        (true, None) => {
            return Err(StoreError::Key(format!(
                "{object} is encrypted: give the key it was stored with (--store-key FILE)"
            )));
        }
        (true, Some(_)) if stored.len() < SEALED_BYTES => return wrong("it is cut off"),
        (true, Some(key)) => match key.decrypt(&place(object, offset), stored) {
            Some(bytes) => bytes,
            None => {
                return Err(StoreError::Key(format!(
                    "{object} cannot be decrypted at byte {offset}: it was stored with another \
                     key than --store-key, or was moved here from elsewhere"
                )));
            }
        },
    };
    if bytes.len() == raw_bytes {
        return Ok(bytes);
    }
    match inflate(&bytes, raw_bytes) {
        Some(raw) if raw.len() == raw_bytes => Ok(raw),
        _ => wrong("it does not unpack to what was packed"),
    }
}

/// Memory grows with what comes out, not with what somebody claims.
fn inflate(bytes: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut raw = Vec::new();
    let decoder = zstd::stream::read::Decoder::new(bytes).ok()?;
    decoder.take(most as u64 + 1).read_to_end(&mut raw).ok()?;
    Some(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_with_its_key_and_in_its_place_only() {
        let raw: Vec<u8> = (0..100_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let (key, other) = (Key::of(&[1; 32]), Key::of(&[2; 32]));
        for key in [None, Some(&key)] {
            let stored = pack(&raw, key, "a", 5).expect("packs");
            assert!(stored.len() < raw.len());
            let open = |key, object, offset| {
                unpack(stored.clone(), key, key.is_some(), (object, offset), raw.len())
            };
            assert_eq!(open(key, "a", 5).expect("unpacks"), raw);
            if key.is_some() {
                assert!(matches!(open(Some(&other), "a", 5), Err(StoreError::Key(_))));
                assert!(matches!(open(key, "b", 5), Err(StoreError::Key(_))));
                assert!(matches!(open(key, "a", 6), Err(StoreError::Key(_))));
                let none = unpack(stored.clone(), None, true, ("a", 5), raw.len());
                assert!(none.is_err_and(|error| error.to_string().contains("--store-key")));
            }
        }
    }

    #[test]
    fn noise_is_stored_as_it_is() {
        let mut raw = vec![0; 4096];
        SystemRandom::new().fill(&mut raw).expect("random bytes");
        assert_eq!(pack(&raw, None, "a", 0).expect("packs"), raw);
        assert_eq!(unpack(raw.clone(), None, false, ("a", 0), 4096).expect("unpacks"), raw);
    }

    #[test]
    fn a_bomb_does_not_go_off() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).expect("packs");
        assert!(unpack(bomb, None, false, ("a", 0), 4096).is_err());
    }
}
