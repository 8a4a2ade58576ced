//! iproto, the binary protocol of Tarantool:
//! <https://www.tarantool.io/en/doc/latest/reference/internals/box_protocol/>.
//!
//! A message is its length, a map with what it is and a map with what it says, in MessagePack.
//! Each connection begins with a greeting of the server.

use rmpv::Value;

use super::connection::{ClientError, Connection};

/// The space of `examples/config/tarantool.lua`: the first that a user makes.
const SPACE: u64 = 512;
/// Kinds of requests.
const SELECT: u64 = 0x01;
const REPLACE: u64 = 0x03;
/// Keys of the maps.
const KIND: u64 = 0x00;
const SPACE_ID: u64 = 0x10;
const LIMIT: u64 = 0x12;
const KEY: u64 = 0x20;
const TUPLE: u64 = 0x21;
const DATA: u64 = 0x30;
/// How the greeting begins, and its length.
const GREETING: (&[u8], usize) = (b"Taran", 128);
/// A length is a number of 32 bits, whatever its value.
const LENGTH_BYTES: usize = 5;
const LENGTH_MARK: u8 = 0xce;

fn put(request: &mut Vec<u8>, kind: u64, said: Vec<(u64, Value)>) {
    let map = |pairs: Vec<(u64, Value)>| {
        Value::Map(pairs.into_iter().map(|(key, value)| (key.into(), value)).collect())
    };
    let mut message = Vec::new();
    for part in [map(vec![(KIND, kind.into())]), map(said)] {
        rmpv::encode::write_value(&mut message, &part).expect("memory takes everything");
    }
    request.push(LENGTH_MARK);
    request.extend_from_slice(&(message.len() as u32).to_be_bytes());
    request.extend_from_slice(&message);
}

/// Appends a request that puts `value` in the place of what is at `key`.
pub(super) fn put_set(request: &mut Vec<u8>, key: &str, value: &str) {
    let tuple = Value::Array(vec![key.into(), value.into()]);
    put(request, REPLACE, vec![(SPACE_ID, SPACE.into()), (TUPLE, tuple)]);
}

/// Appends a request for what is at `key`.
pub(super) fn put_get(request: &mut Vec<u8>, key: &str) {
    let key = Value::Array(vec![key.into()]);
    put(request, SELECT, vec![(SPACE_ID, SPACE.into()), (LIMIT, 1.into()), (KEY, key)]);
}

/// Takes a reply: the tuples in it.
pub(super) fn take(connection: &mut Connection) -> Result<Vec<Value>, ClientError> {
    let mut head = connection.bytes(LENGTH_BYTES)?;
    if head == GREETING.0 {
        connection.bytes(GREETING.1 - LENGTH_BYTES)?;
        head = connection.bytes(LENGTH_BYTES)?;
    }
    let wrong = |what: &str| ClientError::Wrong(format!("the server sent {what}"));
    let &[LENGTH_MARK, a, b, c, d] = head else { return Err(wrong("no length")) };
    let mut message = connection.bytes(u32::from_be_bytes([a, b, c, d]) as usize)?;
    let mut next = || {
        let value = rmpv::decode::read_value(&mut message);
        value.map_err(|error| wrong(&format!("what is no MessagePack: {error}")))
    };
    let (header, body) = (next()?, next()?);
    match (field(&header, KIND).and_then(Value::as_u64), field(&body, DATA)) {
        (Some(0), Some(Value::Array(tuples))) => Ok(tuples.clone()),
        _ => Err(wrong(&format!("{header} {body}"))),
    }
}

fn field(map: &Value, key: u64) -> Option<&Value> {
    let pairs = map.as_map()?;
    pairs.iter().find(|(name, _)| name.as_u64() == Some(key)).map(|(_, value)| value)
}

/// The value in a tuple of key and value.
pub(super) fn value(tuple: &Value) -> Option<String> {
    tuple.as_array()?.get(1)?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by hand after the description of the protocol.
    #[test]
    fn requests_are_those_of_the_protocol() {
        let mut request = Vec::new();
        put_set(&mut request, "k", "v");
        let wanted = b"\xce\0\0\0\x0e\x81\0\x03\x82\x10\xcd\x02\0\x21\x92\xa1k\xa1v";
        assert_eq!(request, wanted);
    }
}
