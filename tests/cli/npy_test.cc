// .npy and raw files: shapes survive, everything that is not a C-order f4 or f8 array is refused, writes are atomic.
#include "integration/cli/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "integration/cli/error.h"
#include "tests/support/test_folder.h"

namespace gradgate::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string npy(const std::string& dictionary, const std::string& values, char major = 1) {
  std::string text("\x93NUMPY", 6);
  text += major;
  text += '\0';
  text += static_cast<char>(dictionary.size() & 0xff);
  text += static_cast<char>(dictionary.size() >> 8);
  if (major == 2) text += std::string(2, '\0');
  return text + dictionary + values;
}
template <class T>
std::string bytes(std::initializer_list<T> values) {
  std::string text(values.size() * sizeof(T), '\0');
  std::memcpy(text.data(), values.begin(), text.size());
  return text;
}
ArrayFile parse(const std::string& text) { return parse_npy({text.data(), text.size()}, "in.npy"); }
std::string refusal(const std::string& text) {
  try {
    (void)parse(text);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

class Npy : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string read(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  std::filesystem::path folder_ = test::test_folder();
};

TEST_F(Npy, ReadsVersions1And2) {
  for (const char major : {'\1', '\2'}) {
    const ArrayFile array = parse(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", bytes<float>({1, 2, 3, 4, 5, 6}), major));
    EXPECT_THAT(array.shape, ElementsAre(2, 3));
    EXPECT_THAT(array.values, ElementsAre(1, 2, 3, 4, 5, 6));
    EXPECT_TRUE(array.is_npy);
    EXPECT_FALSE(array.narrowed);
  }
}

TEST_F(Npy, ReadsDoublesScalarsAndEmptyArrays) {
  const ArrayFile doubles = parse(npy("{\"shape\": (2,), \"fortran_order\": False, \"descr\": \"<f8\"}", bytes<double>({0.5, -3})));
  EXPECT_THAT(doubles.values, ElementsAre(0.5f, -3.0f));
  EXPECT_TRUE(doubles.narrowed);
  EXPECT_TRUE(parse(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (), }", bytes<float>({7}))).shape.empty());
  EXPECT_TRUE(parse(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 5), }", "")).values.empty());
  EXPECT_THAT(parse(npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }", bytes<float>({1, 2}))).values, ElementsAre(1, 2)) << "one dimension has one order";
}

TEST_F(Npy, RefusesWhatItCannotRead) {
  const std::string two = bytes<float>({1, 2});
  const std::string good = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", two);
  EXPECT_EQ(refusal(good), "accepted");
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }", two)), HasSubstr("fortran_order"));
  for (const char* descr : {"<f2", ">f4", "<i4", "|u1", "<c8", "=f4"}) {
    EXPECT_THAT(refusal(npy("{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (2,), }", two)),
                ::testing::AllOf(HasSubstr(descr), HasSubstr("'<f4' and '<f8'"))) << descr;
  }
  EXPECT_THAT(refusal(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", two)), HasSubstr("structured"));
  EXPECT_THAT(refusal(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", bytes<double>({1e300}))), HasSubstr("does not fit in f32"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", two)), HasSubstr("truncated"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", two)), HasSubstr("bytes after the array"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", two)), HasSubstr("overflows"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", two)), HasSubstr("shape"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'shape': (2,), }", two)), HasSubstr("lacks"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", two)), HasSubstr("unexpected key"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), } x", two)), HasSubstr("text after"));
  EXPECT_THAT(refusal("not numpy at all"), HasSubstr("magic"));
  EXPECT_THAT(refusal(""), HasSubstr("magic"));
  std::string version3 = good;
  version3[6] = '\3';
  EXPECT_THAT(refusal(version3), HasSubstr("version 3"));
}

TEST_F(Npy, EveryTruncationIsRefused) {
  const std::string good = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", bytes<float>({1, 2}));
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(refusal(good.substr(0, length)), "accepted") << length;
    EXPECT_NE(refusal(npy(good.substr(10, length), "")), "accepted") << length;
  }
}

TEST_F(Npy, WritesWhatItReads) {
  for (const std::vector<size_t>& shape : {std::vector<size_t>{}, {1}, {2, 3}, {0}, {3, 1, 2}}) {
    size_t count = 1;
    for (const size_t extent : shape) count *= extent;
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) - 0.5f;
    write_array(path("a.npy"), shape, values);
    const ArrayFile back = read_array(path("a.npy"));
    EXPECT_EQ(back.shape, shape);
    EXPECT_EQ(back.values, values);
    EXPECT_EQ(format_npy_header(shape).size() % 64, 0u);
    write_array(path("a.f32"), shape, values);
    EXPECT_EQ(read_array(path("a.f32")).values, values);
    EXPECT_EQ(read(path("a.f32")).size(), count * 4);
  }
}

TEST_F(Npy, AFailedWriteLeavesWhatWasThere) {
  const std::vector<float> values = {1, 2};
  EXPECT_THROW(write_array(path("missing/a.npy"), {2}, values), RunError);
  std::filesystem::create_directories(path("folder.npy/inside"));
  EXPECT_THROW(write_array(path("folder.npy"), {2}, values), RunError) << "a folder cannot be replaced";
  size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++entries;
  EXPECT_EQ(entries, 1u) << "no temporary file is left";
}

TEST_F(Npy, RawFilesHaveWholeValuesAndKnownSuffixes) {
  std::ofstream(path("odd.f32"), std::ios::binary) << "12345";
  EXPECT_THROW((void)read_array(path("odd.f32")), UsageError);
  EXPECT_THROW((void)read_array(path("absent.f32")), UsageError);
  EXPECT_THROW((void)read_array(folder_.string()), UsageError);
  EXPECT_NO_THROW(check_array_suffix("in", "x.npy"));
  EXPECT_NO_THROW(check_array_suffix("in", "x.f32"));
  EXPECT_THROW(check_array_suffix("in", "x.npz"), UsageError);
  EXPECT_THROW(check_array_suffix("in", "npy"), UsageError);
}

}  // namespace
}  // namespace gradgate::cli
